"""Operators on texts, and learners of which only onnx.reference has a kernel: by the standard's text, or refused.

Each row runs twice: as a node, and in the body of an If beside an operator that ONNX Runtime lacks, so that the
reference evaluates it.
"""

from __future__ import annotations

from contextlib import nullcontext

import dask
import dask.array as da
import numpy as np
import onnx
import pytest

import dask_ferro as ff
from dask_ferro.graph.ir.dtypes import NAMES

# Empty, accented, long, with a NUL in the midst and at the end, with spaces; and a stop word.
TEXTS = ["", "Déjà", "n" * 70 + "É", "a\0b\0", "  a  b", "The"]
HEAD = '<ir_version: 10, opset_import: ["": 20, "ai.onnx.ml": 4, "com.microsoft": 1]>\n'
STOP = '<case_change_action = "UPPER", stopwords = ["tHE"]>'
TREE = (
    "nodes_treeids=[0,0,0], nodes_nodeids=[0,1,2], nodes_featureids=[0,0,0], nodes_values=[0.5,0.0,0.0],"
    ' nodes_modes=["BRANCH_LEQ","LEAF","LEAF"], nodes_truenodeids=[1,0,0], nodes_falsenodeids=[2,0,0],'
    " target_treeids=[0,0], target_nodeids=[1,2], target_ids=[0,0], target_weights=[1.5,2.5], n_targets=1"
)
GRAMS = (
    'mode = "TF", min_gram_length = 1, max_gram_length = 2, max_skip_count = 0, ngram_counts = [0, 2],'
    ' ngram_indexes = [0, 1, 2, 3], pool_strings = ["", "Déjà", "a", "b", "b", "c"]'
)
TABLE = [[1, 2], [0, -3]]


def each(change):
    return list(map(change, TEXTS))


# Operator, dtype of its result, and the values by the standard (None: refused).
ON_TEXTS = [
    ('StringNormalizer<case_change_action = "LOWER">(s)', "string", each(str.lower)),
    ('StringNormalizer<case_change_action = "UPPER">(s)', "string", each(str.upper)),
    ("StringNormalizer<is_case_sensitive = 1>(s)", "string", TEXTS),
    (f"StringNormalizer{STOP}(s)", "string", each(str.upper)[:5]),
    ('StringNormalizer<is_case_sensitive = 1, stopwords = ["the"]>(s)', "string", TEXTS),
    ('StringNormalizer<case_change_action = "LOWER", locale = "tr_TR">(s)', "string", None),
    ("StringConcat(s, s)", "string", each(lambda t: t + t)),
    ("StringSplit(s)", "string", [["", ""], *([t, ""] for t in TEXTS[1:4]), ["a", "b"], ["The", ""]]),
    ('RegexFullMatch<pattern = "[[:alpha:]éà]+">(s)', "bool", each(lambda t: t in ("Déjà", "The"))),
    ("Equal(s, s)", "bool", [True] * 6),
    ("Identity(s)", "string", TEXTS),
    ("Concat<axis = 0>(s, s)", "string", TEXTS + TEXTS),
    ("Unique(s)", "string", sorted(TEXTS)),
    ("Gather(s, i)", "string", ["Déjà", "a\0b\0"]),
    ("Reshape(s, r)", "string", [TEXTS[:3], TEXTS[3:]]),
    ("Where(i2, s, s)", "string", TEXTS),
    (
        'LabelEncoder<keys_strings = ["", "Déjà", "a"], values_int64s = [1, 2, 3]>(s)',
        "int64",
        [1, 2, -1, -1, -1, -1],
    ),
    ('LabelEncoder<keys_strings = ["The"], values_strings = ["é"]>(s)', "string", ["_Unused"] * 5 + ["é"]),
    ('CategoryMapper<cats_strings = ["", "The"], cats_int64s = [1, 2]>(s)', "int64", [1, -1, -1, -1, -1, 2]),
    ('OneHotEncoder<cats_strings = ["", "The"]>(s)', "float", [[1, 0], *[[0, 0]] * 4, [0, 1]]),
    (f"TfIdfVectorizer<{GRAMS}>(s)", "float", [1, 1, 0, 0]),
    ("CastLike(x, s)", "string", ["NaN", "INF", "1.5"]),
    ("Cast<to = 8>(x)", "string", ["NaN", "INF", "1.5"]),
    ("Cast<to = 1>(n)", "float", [1000.0, -np.inf, np.nan]),
    ("Trilu(q)", "string", None),
    ("Pad(s, i)", "string", None),
    ("NonZero(s)", "int64", None),
    ("DepthToSpace<blocksize = 2>(d)", "string", [[[["a", "b\0"], ["É", ""]]]]),
]
# Learners of other dtypes than ONNX Runtime's: the scores are floats, whatever the table's dtype.
ON_TABLES = [
    ("LinearRegressor<coefficients = [0.5, 1.0], intercepts = [0.25]>(t)", "float", [[2.75], [-2.75]]),
    ("LinearRegressor<coefficients = [0.5, 1.0]>(t)", "float", [[2.5], [-3.0]]),
    ('LinearRegressor<coefficients = [0.5, 1.0], post_transform = "LOGISTIC">(t)', "float", None),
    (
        'SVMRegressor<coefficients = [0.5, -0.5], kernel_type = "RBF", kernel_params = [0.5, 0.0, 3.0], n_supports = 2,'
        " rho = [0.25], support_vectors = [1.0, 2.0, 0.0, -3.0]>(t)",
        "float",
        [[0.75 - np.exp(-13) / 2], [-0.25 + np.exp(-13) / 2]],
    ),
    (f"TreeEnsembleRegressor<{TREE}>(t)", "float", [[2.5], [1.5]]),
    ("Binarizer<threshold = 0.5>(t)", "T", [[1, 1], [0, 0]]),
    ("OneHotEncoder<cats_int64s = [1, 2]>(t)", "float", [[[1, 0], [0, 1]], [[0, 0], [0, 0]]]),
    ("Scaler<offset = [1.0], scale = [0.5]>(t)", "float", [[0, 0.5], [-0.5, -2]]),
]
NUMPY = {"float": "float32", "double": "float64"} | {name: name for name in NAMES.values()}
ML = (
    "LabelEncoder",
    "CategoryMapper",
    "OneHotEncoder",
    "LinearRegressor",
    "SVM",
    "Tree",
    "Binarizer",
    "Scaler",
)
FEEDS = {
    "s": ("string[N]", np.array(TEXTS, object)),
    "n": ("string[M]", np.array(["1e3", "-INF", "nan"], object)),
    "q": ("string[2, 2]", np.array([["a", "b"], ["c", "d"]], object)),
    "d": ("string[1, 4, 1, 1]", np.array(["a", "b\0", "É", ""], object).reshape(1, 4, 1, 1)),
    "x": ("float[M]", np.array([np.nan, np.inf, 1.5], np.float32)),
    "i": ("int64[2]", np.array([1, 3])),
    "i2": ("bool[N]", np.array([True, False] * 3)),
    "r": ("int64[2]", np.array([2, 3])),
}


def outcome(call, result, feeds, *, in_body):
    """Return the result of a call of one operator as a list, or "refused"."""
    call = f"ai.onnx.ml.{call}" if call.startswith(ML) else call
    names = call.rpartition("(")[2].rstrip(")").split(", ")
    inputs = {name: feeds[name] for name in dict.fromkeys([*names, *(("c", "w") if in_body else ())])}
    also = ", {}z" if call.startswith("StringSplit") else ""
    node = f"y{also.format('')} = {call}"
    if in_body:
        branches = (
            f"{b} = {b}g () => ({result} {b}y) {{ {b}n = StringNormalizer(w) {b}y{also.format(b)} = {call} }}"
            for b in ("then_branch", "else_branch")
        )
        node = f"y = If(c) <{', '.join(branches)}>"
    head = ", ".join(f"{kind} {name}" for name, (kind, _) in inputs.items())
    text = f"{HEAD}g ({head}) => ({result} y) {{ {node} }}"
    try:
        model = ff.from_onnx(onnx.parser.parse_model(text))
        value = model({name: array for name, (_, array) in inputs.items()}).compute(scheduler="sync")
    except ff.UnsupportedOp:
        return "refused"
    assert value.dtype == (object if result == "string" else NUMPY[result]), call
    return value.tolist()


def test_texts_and_learners_are_by_the_standard_or_refused():
    feeds = FEEDS | {"c": ("bool", np.array(True)), "w": ("string[K]", np.array(["w"], object))}
    rows = [(call, result, right, feeds) for call, result, right in ON_TEXTS]
    for kind in ("int32", "int64", "double"):
        table = {"t": (f"{kind}[N, 2]", np.array(TABLE, NUMPY[kind]))}
        rows += [
            (call, kind if result == "T" else result, right, feeds | table)
            for call, result, right in ON_TABLES
        ]
    wrong = {}
    for call, result, right, given in rows:
        node, body = (outcome(call, result, given, in_body=inside) for inside in (False, True))
        print(f"{call:70.70} {given.get('t', ' ')[0]:14} node: {node!s:50.50} body: {body!s:.50}")
        wanted = "refused" if right is None else right
        fits = [one == "refused" or same(one, wanted) for one in (node, body)]
        if not all(fits) or (node == "refused") != (right is None):
            wrong[call, given.get("t", " ")[0]] = node, body, wanted
    assert wrong == {}


def same(got, wanted):
    if isinstance(wanted, str) or np.array(wanted).dtype.kind in "Ub":
        return got == wanted
    return np.shape(got) == np.shape(wanted) and np.allclose(got, wanted, rtol=1e-6, equal_nan=True)


@pytest.mark.parametrize("missing", [None, float("nan"), b"a", 1], ids=str)
def test_a_text_that_is_missing_is_refused_in_a_call_a_chunk_and_a_task(missing):
    model = ff.from_onnx(
        onnx.parser.parse_model(f"{HEAD}g (string[N] s) => (string[N] y) {{ y = Identity(s) }}")
    )
    texts, others = np.array(["a", "b"], object), np.array(["a", missing], object)
    chunks = [da.from_delayed(dask.delayed(part), (2,), object) for part in (texts, others)]
    for given in (others, da.concatenate(chunks), dask.delayed(others)):
        with pytest.raises(ff.ConfigError, match=f"input 's' holds {type(missing).__name__} among its texts"):
            model(given).compute(scheduler="sync")


@pytest.mark.parametrize(
    ("pattern", "is_refused"),
    [("[a-zA-Z0-9_]+", True), (r"\\w+", True), (r"[\\p{L}]+", False), ("[[:alpha:]é]+", False)],
)
def test_a_vocabulary_with_words_that_its_tokenizer_never_gives_is_refused(pattern, is_refused):
    made = (
        f'w = com.microsoft.Tokenizer<mark = 0, mincharnum = 1, pad_value = "#", tokenexp = "{pattern}">(s)'
        ' y = TfIdfVectorizer<mode = "TF", min_gram_length = 1, max_gram_length = 1, max_skip_count = 0,'
        ' ngram_counts = [0], ngram_indexes = [0, 1], pool_strings = ["vu", "déjà"]>(w)'
    )
    model = onnx.parser.parse_model(f"{HEAD}g (string[N] s) => (float[N, 2] y) {{ {made} }}")
    refusal = pytest.raises(ff.UnsupportedOp, match=r"1 words .* never gives \('déjà'\), so texts")
    with refusal if is_refused else nullcontext():
        ff.from_onnx(model)
