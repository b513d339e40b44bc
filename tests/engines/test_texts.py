"""Operators on texts, and learners of which only onnx.reference has a kernel: by the standard's text, or refused.

Each row runs as a node, and in the body of an If beside an operator that ONNX Runtime lacks, where the reference
evaluates it.
"""

from __future__ import annotations

from contextlib import nullcontext

import dask
import dask.array as da
import numpy as np
import onnx
import pytest

import dask_ferro as ff

# Empty, accented, long, with a NUL in the midst and at the end, with spaces; and a stop word.
TEXTS = ["", "Déjà", "n" * 70 + "É", "a\0b\0", "  a  b", "The"]
UPPER = list(map(str.upper, TEXTS))
HEAD = '<ir_version: 10, opset_import: ["": 20, "ai.onnx.ml": 4, "com.microsoft": 1]>\n'
NUMPY = {"string": "object", "float": "float32", "double": "float64"}
GRAMS = (
    'mode = "TF", min_gram_length = 1, max_gram_length = 2, max_skip_count = 0, ngram_counts = [0, 2],'
    ' ngram_indexes = [0, 1, 2, 3], pool_strings = ["", "Déjà", "a", "b", "b", "c"]'
)
TREE = (
    "nodes_treeids=[0,0,0], nodes_nodeids=[0,1,2], nodes_featureids=[0,0,0], nodes_values=[0.5,0.0,0.0],"
    ' nodes_modes=["BRANCH_LEQ","LEAF","LEAF"], nodes_truenodeids=[1,0,0], nodes_falsenodeids=[2,0,0],'
    " target_treeids=[0,0], target_nodeids=[1,2], target_ids=[0,0], target_weights=[1.5,2.5], n_targets=1"
)
REFUSED = "refused"

# fmt: off
FEEDS = {
    "s": ("string[N]", TEXTS), "n": ("string[M]", ["1e3", "-INF", "nan"]), "q": ("string[2,2]", [["a", "b"]] * 2),
    "d": ("string[1,4,1,1]", [[[["a"]], [["b\0"]], [["É"]], [[""]]]]), "x": ("float[M]", [np.nan, np.inf, 1.5]),
    "i": ("int64[2]", [1, 3]), "m": ("bool[N]", [True, False] * 3), "c": ("bool", True), "w": ("string[K]", ["w"]),
}
# Operator, dtype of its result, and its value by the standard.
ON_TEXTS = [
    ('StringNormalizer<case_change_action = "LOWER">(s)', "string", list(map(str.lower, TEXTS))),
    ('StringNormalizer<case_change_action = "UPPER">(s)', "string", UPPER),
    ('StringNormalizer<case_change_action = "UPPER", stopwords = ["tHE"]>(s)', "string", UPPER[:5]),
    ('StringNormalizer<is_case_sensitive = 1, stopwords = ["the", "b"]>(s)', "string", TEXTS),
    ('StringNormalizer<case_change_action = "LOWER", locale = "tr_TR">(s)', "string", REFUSED),
    ("StringConcat(s, s)", "string", [t + t for t in TEXTS]),
    ("StringSplit(s)", "string", [["", ""], *([t, ""] for t in TEXTS[1:4]), ["a", "b"], ["The", ""]]),
    ('RegexFullMatch<pattern = "[[:alpha:]éà]+">(s)', "bool", [t in ("Déjà", "The") for t in TEXTS]),
    (f"TfIdfVectorizer<{GRAMS}>(s)", "float", [1, 1, 0, 0]),
    ("Equal(s, s)", "bool", [True] * 6),
    ("Where(m, s, s)", "string", TEXTS),
    ("Concat<axis = 0>(s, s)", "string", TEXTS + TEXTS),
    ("Unique(s)", "string", sorted(TEXTS)),
    ("Gather(s, i)", "string", ["Déjà", "a\0b\0"]),
    ("DepthToSpace<blocksize = 2>(d)", "string", [[[["a", "b\0"], ["É", ""]]]]),
    ('LabelEncoder<keys_strings = ["", "Déjà", "a"], values_int64s = [1, 2, 3]>(s)', "int64", [1, 2, -1, -1, -1, -1]),
    ('LabelEncoder<keys_strings = ["The"], values_strings = ["é"]>(s)', "string", ["_Unused"] * 5 + ["é"]),
    ('CategoryMapper<cats_strings = ["", "The"], cats_int64s = [1, 2]>(s)', "int64", [1, -1, -1, -1, -1, 2]),
    ('OneHotEncoder<cats_strings = ["", "The"]>(s)', "float", [[1, 0], *[[0, 0]] * 4, [0, 1]]),
    ("CastLike(x, s)", "string", ["NaN", "INF", "1.5"]),
    ("Cast<to = 8>(x)", "string", ["NaN", "INF", "1.5"]),
    ("Cast<to = 1>(n)", "float", [1000.0, -np.inf, np.nan]),
    *((call, "string", REFUSED) for call in ("Trilu(q)", "Pad(s, i)", "Resize(d, , x)")),
]
# Learners of other dtypes than ONNX Runtime's: scores are floats, whatever the table's dtype.
ON_TABLES = [
    ("LinearRegressor<coefficients = [0.5, 1.0], intercepts = [0.25]>(t)", "float", [[2.75], [-2.75]]),
    ("LinearRegressor<coefficients = [0.5, 1.0]>(t)", "float", [[2.5], [-3.0]]),
    ('LinearRegressor<coefficients = [0.5, 1.0], post_transform = "LOGISTIC">(t)', "float", REFUSED),
    ('SVMRegressor<kernel_type = "LINEAR", coefficients = [0.5, 1.0], rho = [0.25]>(t)', "float", [[2.75], [-2.75]]),
    (f"TreeEnsembleRegressor<{TREE}>(t)", "float", [[2.5], [1.5]]),
    ("Binarizer<threshold = 0.5>(t)", "", [[1, 1], [0, 0]]),
    ("Scaler<offset = [1.0], scale = [0.5]>(t)", "float", [[0, 0.5], [-0.5, -2]]),
]
# fmt: on


def outcome(call, result, feeds, in_body):
    """Return the result of an operator as a list, or that it is refused."""
    names = call.rpartition("(")[2].rstrip(")").replace(" ", "").split(",")
    # Only operators of ai.onnx.ml have its schema.
    call = (
        f"ai.onnx.ml.{call}"
        if onnx.defs.has(call.partition("<")[0].partition("(")[0], "ai.onnx.ml")
        else call
    )
    used = {n: feeds[n] for n in dict.fromkeys([*names, *("cw" if in_body else "")]) if n}
    also = ", {0}z" if call.startswith("StringSplit") else ""
    body = (
        f"{{0}} = {{0}}g () => ({result} {{0}}y) {{{{ {{0}}n = StringNormalizer(w) {{0}}y{also} = {call} }}}}"
    )
    bodies = ", ".join(body.format(b) for b in ("then_branch", "else_branch"))
    node = f"y = If(c) <{bodies}>" if in_body else f"y{also.format('')} = {call}"
    head = ", ".join(f"{kind} {name}" for name, (kind, _) in used.items())
    dtypes = {name: kind.partition("[")[0] for name, (kind, _) in used.items()}
    arrays = {
        name: np.array(value, NUMPY.get(dtypes[name], dtypes[name])) for name, (_, value) in used.items()
    }
    try:
        model = ff.from_onnx(onnx.parser.parse_model(f"{HEAD}g ({head}) => ({result} y) {{ {node} }}"))
    except ff.UnsupportedOpError:
        return REFUSED
    # Where nothing is inferred, the shape that the text declares is wrong, and only a result can be compared with it.
    value = model.predict(arrays)
    return value.tolist() if value.dtype == NUMPY.get(result, result) else value.dtype


def test_texts_and_learners_are_by_the_standard_or_refused():
    rows = [(*row, FEEDS) for row in ON_TEXTS]
    for kind in ("int32", "int64", "double"):
        feeds = FEEDS | {"t": (f"{kind}[N, 2]", [[1, 2], [0, -3]])}
        rows += [(call, result or kind, right, feeds) for call, result, right in ON_TABLES]
    wrong = []
    for call, result, right, feeds in rows:
        node, body = (outcome(call, result, feeds, in_body) for in_body in (False, True))
        print(line := f"{call:70.70} {feeds.get('t', ' ')[0]:14} node: {node!s:50.50} body: {body!s:.50}")
        if not same(node, right) or not (body == REFUSED or same(body, right)):
            wrong.append(line)
    assert wrong == []


def same(got, right):
    if isinstance(got, str) or np.array(right).dtype.kind in "Ub":
        return got == right
    return np.shape(got) == np.shape(right) and np.allclose(got, right, rtol=1e-6, equal_nan=True)


@pytest.mark.parametrize("missing", [None, float("nan"), b"a", 1], ids=str)
def test_a_text_that_is_missing_is_refused_in_a_call_a_chunk_and_a_task(missing):
    model = ff.from_onnx(
        onnx.parser.parse_model(f"{HEAD}g (string[N] s) => (string[N] y) {{ y = Identity(s) }}")
    )
    texts, others = np.array(["a", "b"], object), np.array(["a", missing], object)
    chunks = [da.from_delayed(dask.delayed(part), (2,), object) for part in (texts, others)]
    for given in (others, da.concatenate(chunks), dask.delayed(others)):
        with pytest.raises(ff.InputError, match=f"input 's' holds {type(missing).__name__} among its texts"):
            model(given).compute(scheduler="sync")


@pytest.mark.parametrize(
    ("pattern", "is_refused"),
    [("[a-zA-Z0-9_]+", True), (r"\\w+", True), (r"[\\p{L}]+", False), ("[[:alpha:]é]+", False)],
)
def test_a_vocabulary_with_words_that_its_tokenizer_never_gives_is_refused(pattern, is_refused):
    tokens = f'com.microsoft.Tokenizer<mark = 0, mincharnum = 1, pad_value = "#", tokenexp = "{pattern}">(s)'
    text = f"{HEAD}g (string[N] s) => (float[N, 4] y) {{ w = {tokens} y = TfIdfVectorizer<{GRAMS}>(w) }}"
    refusal = pytest.raises(ff.UnsupportedOpError, match=r"2 words .* never gives \('', 'Déjà'\), so texts")
    with refusal if is_refused else nullcontext():
        ff.from_onnx(onnx.parser.parse_model(text))
