// The timeline of a run report: one canvas, drawn from the spans in the page, with zoom, pan and a tip.
"use strict";
(() => {
  const run = JSON.parse(document.getElementById("run").textContent);
  const place = document.getElementById("timeline");
  if (!run.spans.length) { place.remove(); return; }

  const [COMPUTE, TRANSFER, STEAL, OP] = [0, 1, 2, 3];
  const text = (number) => run.texts[number];
  const spans = run.spans.map(([kind, key, prefix, worker, lane, start, took, bytes, source]) =>
    ({ kind, key, prefix, worker, lane, start, stop: start + took, took, bytes, source }));
  const path = new Set(run.path);

  // ---- lanes: a band for each worker, in it a row for each thread, with its ops, and thin ones for transfers and steals ----
  // Browsers draw canvases of up to 32,767 pixels: with many lanes, rows are thin and pixels not doubled.
  const lanes = run.workers.reduce((sum, [, threads]) => sum + Math.max(threads, 1), 0);
  const ROW = lanes > 400 ? 8 : 18, THIN = lanes > 400 ? 3 : 7, GAP = lanes > 400 ? 2 : 8, LEFT = 190, TOP = 22;
  const bands = new Map();
  for (const [worker, threads] of run.workers) bands.set(worker, { worker, lanes: Math.max(threads, 1), moves: false, tall: ROW });
  for (const s of spans) {
    if (!bands.has(s.worker)) bands.set(s.worker, { worker: s.worker, lanes: 1, moves: false, tall: ROW });
    const band = bands.get(s.worker);
    if (s.kind === TRANSFER || s.kind === STEAL) band.moves = true;
    else band.lanes = Math.max(band.lanes, s.lane + 1);
    if (s.kind === OP) band.tall = ROW + THIN;
  }
  let height = TOP;
  for (const band of bands.values()) {
    band.top = height;
    height += band.lanes * band.tall + (band.moves ? 2 * THIN : 0) + GAP;
  }

  // ---- colours: by the place of a prefix among those that took longest, golden angles apart ----
  const rank = new Map(run.prefixes.map((prefix, i) => [prefix, i]));
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const hue = (prefix) => ((rank.get(prefix) ?? (rank.size + prefix)) * 137.508 + 205) % 360;
  const colour = (prefix) => `hsl(${hue(prefix)} 52% ${dark.matches ? 58 : 52}%)`;
  const themed = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // ---- the parts of the page ----
  const body = document.createElement("div");
  body.className = "body";
  const canvas = document.createElement("canvas");
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", "what each thread did over time");
  canvas.tabIndex = 0;
  body.append(canvas);
  place.append(body);
  const tip = document.createElement("div");
  tip.className = "tip";
  document.body.append(tip);
  place.after(legend());

  function legend() {
    const list = document.createElement("div");
    list.className = "legend";
    const entry = (name, fill) => {
      const item = document.createElement("span"), box = document.createElement("i");
      box.style.background = fill;
      item.append(box, name);
      list.append(item);
    };
    for (const prefix of run.prefixes.slice(0, 12)) entry(text(prefix), colour(prefix));
    if (run.prefixes.length > 12) entry(`and ${run.prefixes.length - 12} more`, "transparent");
    const ops = [...new Set(spans.filter((s) => s.kind === OP).map((s) => s.prefix))];
    for (const op of ops.slice(0, 8)) entry(`op ${text(op)}`, colour(op));
    if (ops.length > 8) entry(`and ${ops.length - 8} more ops`, "transparent");
    if (spans.some((s) => s.kind === TRANSFER)) entry("transfer", "var(--transfer)");
    if (spans.some((s) => s.kind === STEAL)) entry("moved: from request to start", "var(--steal)");
    if (path.size) entry("critical path", "var(--path)");
    return list;
  }

  // ---- what is seen: microseconds from `from` to `to` ----
  const end = Math.max(run.makespan, 1);
  let from = 0, to = end, scale = 1, width = 0;
  const x = (us) => LEFT + (us - from) * scale;

  function box(s) {
    const band = bands.get(s.worker);
    const below = band.top + band.lanes * band.tall;
    if (s.kind === TRANSFER) return [below + 1, THIN - 2];
    if (s.kind === STEAL) return [below + THIN + 1, THIN - 2];
    const top = band.top + s.lane * band.tall;
    return s.kind === OP ? [top + ROW, THIN - 1] : [top + 1, ROW - 2];
  }

  function draw() {
    const ratio = height > 15000 ? 1 : devicePixelRatio || 1;
    width = body.clientWidth;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    canvas.style.height = `${height}px`;
    const c = canvas.getContext("2d");
    c.setTransform(ratio, 0, 0, ratio, 0, 0);
    c.clearRect(0, 0, width, height);
    c.font = "12px system-ui, sans-serif";
    c.textBaseline = "middle";
    scale = (width - LEFT) / (to - from);
    drawTimes(c);
    drawBands(c);
    c.save();
    c.beginPath();
    c.rect(LEFT, TOP, width - LEFT, height - TOP);
    c.clip();
    for (const kind of [COMPUTE, OP, TRANSFER, STEAL]) drawSpans(c, kind);
    c.restore();
  }

  function drawTimes(c) {
    const step = niceStep((to - from) / Math.max((width - LEFT) / 110, 1));
    c.strokeStyle = themed("--line");
    c.fillStyle = themed("--muted");
    c.textAlign = "left";
    for (let t = Math.ceil(from / step) * step; t <= to; t += step) {
      const at = Math.round(x(t)) + 0.5;
      c.beginPath();
      c.moveTo(at, TOP - 4);
      c.lineTo(at, height);
      c.stroke();
      if (at + 56 < width) c.fillText(duration(t), at + 3, 10);
    }
  }

  function drawBands(c) {
    for (const band of bands.values()) {
      c.fillStyle = themed("--text");
      c.textAlign = "left";
      c.fillText(fitted(c, text(band.worker)), 8, band.top + ROW / 2);
      c.strokeStyle = themed("--line");
      c.beginPath();
      c.moveTo(0, band.top - GAP / 2 + 0.5);
      c.lineTo(width, band.top - GAP / 2 + 0.5);
      c.stroke();
    }
  }

  function fitted(c, name) {
    if (c.measureText(name).width <= LEFT - 16) return name;
    while (name.length > 4 && c.measureText("\u2026" + name).width > LEFT - 16) name = name.slice(1);
    return "\u2026" + name;
  }

  function drawSpans(c, kind) {
    const [edge, transfer, steal] = ["--path", "--transfer", "--steal"].map(themed);
    const last = new Map(); // per row, the pixel that is painted: a run of tiny spans costs one rectangle a pixel
    for (const s of spans) {
      if (s.kind !== kind || s.stop < from || s.start > to) continue;
      const [top, tall] = box(s);
      const left = Math.max(x(s.start), LEFT), wide = Math.max(Math.min(x(s.stop), width) - left, 1);
      const marked = kind === COMPUTE && path.has(s.key);
      if (wide <= 1 && !marked && last.get(top) === Math.floor(left)) continue;
      last.set(top, Math.floor(left));
      c.fillStyle = kind === TRANSFER ? transfer : kind === STEAL ? steal : colour(s.prefix);
      c.fillRect(left, top, wide > 3 ? wide - 0.6 : wide, tall);
      if (marked) {
        c.fillStyle = edge;
        c.fillRect(left, top, wide, 2.5);
      }
      if (kind === COMPUTE && wide > 40) name(c, s, left, wide, top, tall);
    }
  }

  function name(c, s, left, wide, top, tall) {
    const told = text(s.prefix);
    if (c.measureText(told).width > wide - 8) return;
    c.fillStyle = ink(c, s.prefix);
    c.textAlign = "left";
    c.fillText(told, left + 4, top + tall / 2);
  }

  const inks = new Map();
  function ink(c, prefix) {
    const fill = colour(prefix);
    if (inks.has(fill)) return inks.get(fill);
    c.fillStyle = fill; // a canvas returns it as #rrggbb
    const parts = [1, 3, 5].map((at) => parseInt(c.fillStyle.slice(at, at + 2), 16) / 255)
      .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    const luminance = 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
    inks.set(fill, luminance > 0.179 ? "#000000" : "#ffffff"); // from there on, black has more contrast
    return inks.get(fill);
  }

  // ---- numbers ----
  function niceStep(least) {
    const power = 10 ** Math.floor(Math.log10(Math.max(least, 1)));
    return [1, 2, 5, 10].map((n) => n * power).find((n) => n >= least);
  }

  function duration(us) {
    if (us >= 1e6) return `${+(us / 1e6).toPrecision(4)} s`;
    if (us < 1) return "0 s";
    return us >= 1e3 ? `${+(us / 1e3).toPrecision(4)} ms` : `${Math.round(us)} us`;
  }

  function size(bytes) {
    for (const [scale, unit] of [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "kiB"]])
      if (bytes >= scale) return `${(bytes / scale).toFixed(2)} ${unit}`;
    return `${bytes} B`;
  }

  // ---- the reader's hand ----
  function look(left, right) {
    const wide = Math.min(Math.max(right - left, 5), end);
    from = Math.min(Math.max(left, 0), end - wide);
    to = from + wide;
    requestAnimationFrame(draw);
  }

  function zoom(at, factor) {
    look(at - (at - from) * factor, at + (to - at) * factor);
  }

  function found(event) {
    const at = canvas.getBoundingClientRect();
    const px = event.clientX - at.left, py = event.clientY - at.top;
    if (px < LEFT) return null;
    let best = null;
    for (const s of spans) {
      const [top, tall] = box(s);
      if (py < top || py > top + tall || x(s.start) - 2 > px || x(s.stop) + 2 < px) continue;
      if (!best || s.took <= best.took) best = s;
    }
    return best;
  }

  function told(s) {
    const lines = [`${duration(s.took)}, from ${duration(s.start)}`];
    if (s.kind === COMPUTE) lines.push(`${size(s.bytes)} made on ${text(s.worker)}, thread ${s.lane}`);
    if (s.kind === OP) lines.push(`${size(s.bytes)} made, ${text(s.source)}`, `in ${text(s.key)}`);
    if (s.kind === TRANSFER) lines.push(`${size(s.bytes)} fetched from ${text(s.source)} for ${text(s.key)}`);
    if (s.kind === STEAL) lines.push(`moved from ${text(s.source)}: ${text(s.key)}`);
    if (s.kind === COMPUTE) lines.push(text(s.key));
    if (path.has(s.key) && s.kind === COMPUTE) lines.push("on the critical path");
    return lines;
  }

  function show(event) {
    const s = found(event);
    tip.style.display = s ? "block" : "none";
    if (!s) return;
    const heading = document.createElement("b");
    heading.textContent = s.kind === COMPUTE || s.kind === OP ? text(s.prefix) : run.kinds[s.kind];
    tip.replaceChildren(heading, ...told(s).map((line) => {
      const row = document.createElement("div");
      row.textContent = line;
      return row;
    }));
    tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
    tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
  }

  let held = null;
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return; // the page scrolls
    event.preventDefault();
    const px = Math.max(event.clientX - canvas.getBoundingClientRect().left, LEFT);
    zoom(from + (px - LEFT) / scale, Math.exp(event.deltaY * 0.002));
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const step = (to - from) / 8;
    const acts = {
      "+": () => zoom((from + to) / 2, 0.7), "-": () => zoom((from + to) / 2, 1 / 0.7), "0": () => look(0, end),
      ArrowLeft: () => look(from - step, to - step), ArrowRight: () => look(from + step, to + step),
    };
    if (!acts[event.key] || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    acts[event.key]();
  });
  canvas.addEventListener("pointerdown", (event) => {
    held = { x: event.clientX, from };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!held) { show(event); return; }
    tip.style.display = "none";
    const left = held.from - (event.clientX - held.x) / scale;
    look(left, left + (to - from));
  });
  canvas.addEventListener("pointerup", () => { held = null; });
  canvas.addEventListener("pointerleave", () => { tip.style.display = "none"; });
  canvas.addEventListener("dblclick", () => look(0, end));
  addEventListener("resize", () => requestAnimationFrame(draw));
  dark.addEventListener("change", () => {
    place.nextElementSibling.replaceWith(legend());
    draw();
  });
  draw();
})();
