"""The back-ends of sparse attention and key selection against each other, in float64 unless a test says otherwise."""

from importlib.util import find_spec

import pytest
import torch

from longarc.errors import ConfigError, ResourceError
from longarc.models import gathered_attention, key_selection
from longarc.models.build import build_model
from longarc.models.cache import CacheShape, PagedCache
from longarc.models.kernels.attention import FlatRuns
from longarc.models.kernels.decode import NativeDecoder
from longarc.models.kernels.native import native
from longarc.models.key_selection import IndexerRows, select_rows
from longarc.models.layout import Layout, Span
from longarc.models.plan import AttentionPlan
from longarc.models.sparse_attention import VARIABLE, backend_for, sparse_attention
from model_cases import sharpened, small_glm

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
OTHERS = ["cpu", pytest.param("triton", marks=needs_triton)]
CPU = torch.device("cpu")
FOREST = Layout((Span(4), Span(9, 0), Span(5, 0), Span(7), Span(3, 1), Span(1)))
"""Short, because Triton's interpreter takes tens of milliseconds for a query."""

# queries, heads, rows of the table, listed rows, value width, width
SHAPES = [
    (1, 1, 1, 1, 1, 2),
    (1, 3, 40, 64, 5, 9),  # one query that sees fewer rows than are listed
    (7, 5, 30, 33, 17, 19),
    (9, 2, 12, 12, 16, 16),  # the whole key is its value
    (6, 33, 50, 7, 4, 8),  # more heads than one block
    (5, 4, 90, 70, 8, 12),  # more keys than two blocks
]


def draw(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def listed(num_queries, num_rows, num_listed):
    """Draw different rows for each query in ascending order, fewer for some; -1 behind them."""
    generator = torch.Generator().manual_seed(num_queries)
    rows = torch.full((num_queries, num_listed), -1)
    for query in range(num_queries):
        most = min(num_rows, num_listed)
        count = most if query % 3 == 1 else 1 + (query * 5) % most
        chosen = torch.randperm(num_rows, generator=generator)[:count]
        rows[query, :count] = chosen.sort().values
    return rows


def everything(backend, query, table, rows, **options):
    """Return values, mass and both gradients."""
    query, table = query.clone().requires_grad_(), table.clone().requires_grad_()
    output, mass = sparse_attention(
        query, table, rows, scale=0.3, backend=backend, with_mass=True, **options
    )
    (output * draw(*output.shape, seed=7)).sum().backward()
    assert not mass.requires_grad
    return output.detach(), mass, query.grad, table.grad


@pytest.mark.parametrize("backend", OTHERS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_back_ends_agree_with_the_reference(backend, shape):
    num_queries, heads, num_rows, num_listed, value, width = shape
    query, table = draw(num_queries, heads, width), draw(num_rows, width, seed=1)
    rows = listed(num_queries, num_rows, num_listed)
    ours = everything(backend, query, table, rows, value_width=value)
    reference = everything("reference", query, table, rows, value_width=value)
    for got, expected, tolerance in zip(ours, reference, (1e-10, 1e-10, 1e-8, 1e-8), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("backend", OTHERS)
def test_the_gradient_is_that_of_finite_differences(backend):
    rows = listed(4, 6, 5)
    query, table = draw(4, 2, 5).requires_grad_(), draw(6, 5, seed=1).requires_grad_()

    def attend(query, table):
        return sparse_attention(query, table, rows, value_width=3, scale=0.4, backend=backend)[0]

    assert torch.autograd.gradcheck(attend, (query, table), atol=1e-7, rtol=0, fast_mode=True)


@needs_triton
def test_in_triton_a_query_is_bitwise_the_same_alone_and_in_company():
    query, table, rows = draw(7, 5, 19), draw(30, 19, seed=1), listed(7, 30, 33)
    options = {"value_width": 17, "scale": 0.3, "backend": "triton"}
    together, _ = sparse_attention(query, table, rows, **options)
    for index in range(7):
        one = slice(index, index + 1)
        assert torch.equal(
            sparse_attention(query[one], table, rows[one], **options)[0], together[one]
        )


@pytest.mark.parametrize("backend", ["reference", *OTHERS])
def test_a_row_that_nobody_lists_may_hold_anything(backend):
    query, table, rows = draw(3, 2, 6), draw(8, 6, seed=1), torch.tensor([[1, 4], [2, -1], [4, 7]])
    dirty = table.clone()
    dirty[[0, 3, 5, 6]] = float("nan")
    for clean_part, dirty_part in zip(
        everything(backend, query, table, rows, value_width=4),
        everything(backend, query, dirty, rows, value_width=4),
        strict=True,
    ):
        assert torch.equal(clean_part, dirty_part)


@needs_triton
@pytest.mark.parametrize("numbers", [1, 40_000])
def test_key_gradients_add_up_alike_in_blocks_of_any_size(numbers, monkeypatch):
    from longarc.models.kernels.triton import attention

    query, table, rows = draw(7, 5, 19), draw(30, 19, seed=1), listed(7, 30, 33)
    whole = everything("triton", query, table, rows, value_width=17)
    monkeypatch.setattr(attention, "KEY_GRADIENTS", numbers)
    for ours, expected in zip(
        everything("triton", query, table, rows, value_width=17), whole, strict=True
    ):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", OTHERS)
def test_half_precision_loses_nothing_of_a_row_that_many_queries_list(backend, monkeypatch):
    """A sum in half precision stops growing where what is added is less than half of its last place."""
    monkeypatch.setattr(gathered_attention, "GATHERED_FLOATS", 1)  # query by query
    # Triton's interpreter cannot do bf16.
    dtype, large = (torch.float16, 2048.0) if backend == "triton" else (torch.bfloat16, 256.0)
    query = torch.ones(41, 1, 3, dtype=dtype)
    table = torch.ones(1, 3, dtype=dtype, requires_grad=True)
    rows = torch.zeros(41, 1, dtype=torch.long)
    output, _ = sparse_attention(query, table, rows, value_width=2, scale=1.0, backend=backend)
    weight = torch.ones(41, 1, 1, dtype=dtype)
    weight[0] = large
    (output * weight).sum().backward()
    assert table.grad.tolist() == [[large + 40, large + 40, 0.0]]


def whole_rows(num_tokens, num_heads, width, dtype=torch.float32):
    """Draw small whole numbers as rows of an indexer: scores are exact in any order, and tie often."""
    generator = torch.Generator().manual_seed(num_tokens)
    shapes = [(num_tokens, num_heads, width), (num_tokens, width), (num_tokens, num_heads)]
    return IndexerRows(
        *(torch.randint(-1, 3, shape, generator=generator).to(dtype) for shape in shapes)
    )


def real_rows(num_tokens, num_heads, width):
    shapes = [(num_tokens, num_heads, width), (num_tokens, width), (num_tokens, num_heads)]
    return IndexerRows(*(draw(*shape, seed=seed) for seed, shape in enumerate(shapes)))


@pytest.mark.parametrize("backend", OTHERS)
@pytest.mark.parametrize(
    ("make", "num_heads", "num_selected"),
    [(whole_rows, 4, 1), (whole_rows, 6, 5), (real_rows, 4, 5), (real_rows, 4, 100)],
)
def test_back_ends_select_the_same_rows_ties_included(backend, make, num_heads, num_selected):
    rows = make(FOREST.num_tokens, num_heads, 5)
    plan = AttentionPlan.of_layout(FOREST, CPU)
    select = lambda name: select_rows(  # noqa: E731
        rows, rows.key, plan, num_selected=num_selected, backend=name
    )
    assert torch.equal(select(backend), select("reference"))


@pytest.mark.parametrize("backend", ["reference", *OTHERS, "native"])
@pytest.mark.parametrize(
    ("part", "token", "broken"),
    [
        ("key", 6, [6, 7, 8, 9]),
        (
            "key",
            1,
            [3, 4, 5, 6, 7, 8, 9],
        ),  # queries before that read all they see, and choose nothing
        ("weight", 6, [6]),
        ("weight", 1, []),
    ],
)
@pytest.mark.parametrize("nan", [float("nan"), -float("nan")], ids=["nan", "-nan"])
def test_a_query_that_chooses_among_scores_without_order_gets_no_row(
    backend, part, token, broken, nan
):
    drawn = real_rows(14, 4, 5)
    rows = IndexerRows(drawn.query.float(), drawn.key.float(), drawn.weight.float())
    plan = AttentionPlan.of_layout(Layout.documents([10, 4]), CPU)
    runs = plan.flat_runs() if backend == "native" else None
    select = lambda: select_rows(  # noqa: E731
        *(rows, rows.key, plan), num_selected=3, backend="cpu" if runs else backend, flat_runs=runs
    )
    expected = select()
    expected[broken] = -1
    getattr(rows, part)[token] = nan
    assert torch.equal(select(), expected)


@pytest.mark.parametrize("backend", ["reference", *OTHERS, "native"])
def test_attention_to_nothing_is_not_a_number(backend):
    query, table, rows = draw(3, 2, 6).float(), draw(8, 6, seed=1).float(), listed(3, 8, 4)
    rows[1] = -1
    runs = FlatRuns.of([(0, 3, 5, torch.arange(8))]) if backend == "native" else None
    attended, mass = sparse_attention(
        query,
        table,
        rows,
        value_width=4,
        scale=0.5,
        with_mass=True,
        backend="cpu" if runs else backend,
        flat_runs=runs,
    )
    assert attended[1].isnan().all()
    assert attended[[0, 2]].isfinite().all()
    assert mass[[0, 2]].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@needs_triton
def test_selection_in_blocks_of_a_long_sequence_keeps_the_tie_rule(dtype, monkeypatch):
    from longarc.models.kernels.triton import selection

    monkeypatch.setattr(selection, "SCORES", 150 * 2)
    rows = whole_rows(150, 4, 3, dtype)
    cache = PagedCache(
        {}, CacheShape(num_slots=2, max_length=150), num_layers=0, dtype=dtype, device=CPU
    )
    plan = AttentionPlan.of_cache(cache, [1], [147], [3], device=CPU)
    queries = IndexerRows(rows.query[147:], rows.key[147:], rows.weight[147:])
    table = torch.full((cache.num_rows, 3), float("nan"), dtype=dtype)
    table[cache.rows_of(1, 150)] = rows.key
    select = lambda name: select_rows(  # noqa: E731
        queries, table, plan, num_selected=131, backend=name
    )
    assert torch.equal(select("triton"), select("reference"))


def one_layer():
    """Make a model with one index head, whose scores often are exactly zero."""
    config = small_glm(num_hidden_layers=1, index_n_heads=1, index_topk=4)
    return sharpened(build_model(config, seed=3)).double()


def draw_ids(count):
    return torch.randint(0, 64, (count,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("backend", OTHERS)
def test_the_model_computes_the_same_with_every_back_end(backend, monkeypatch):
    model, ids = one_layer(), draw_ids(FOREST.num_tokens)

    def step(name):
        monkeypatch.setenv(VARIABLE, name)
        model.zero_grad()
        output = model(ids, FOREST, indexer_loss="sparse")
        hidden = output.hidden
        ((hidden * draw(*hidden.shape)).sum() + output.indexer_loss_sum).backward()
        return hidden.detach(), {n: p.grad for n, p in model.named_parameters()}

    hidden, gradients = step(backend)
    expected_hidden, expected_gradients = step("reference")
    torch.testing.assert_close(hidden, expected_hidden, rtol=0, atol=1e-10)
    for name, expected in expected_gradients.items():
        if expected is not None:
            scale = max(1.0, float(expected.abs().max()))
            torch.testing.assert_close(
                gradients[name] / scale, expected / scale, rtol=0, atol=1e-8, msg=name
            )


@pytest.mark.parametrize("backend", ["reference", *OTHERS])
def test_decoding_from_a_cache_is_one_forward_pass_with_every_back_end(backend, monkeypatch):
    monkeypatch.setenv(VARIABLE, backend)
    model, ids = one_layer(), draw_ids(16)
    cache = model.new_cache(3, 20)
    model.extend(ids.flip(0), [2], [0], [16], cache)  # leaves rows of another sequence behind
    first = model.extend(ids[:10], [1, 2], [0, 0], [7, 3], cache)
    rest = [model.extend(ids[7:13], [1], [7], [6], cache)]
    for position in range(13, 16):
        token = ids[position : position + 1]
        both = model.extend(
            torch.cat([token, token]), [2, 1], [position - 10, position], [1, 1], cache
        )
        rest.append(both[1:])
    with torch.no_grad():
        whole = model(ids, Layout.documents([16])).hidden
    torch.testing.assert_close(torch.cat([first[:7], *rest]), whole, rtol=0, atol=1e-10)


def test_blocks_of_one_query_are_blocks_of_many(monkeypatch):
    query, table, rows = draw(9, 3, 6), draw(30, 6, seed=1), listed(9, 30, 8)
    index, plan = (
        whole_rows(FOREST.num_tokens, 4, 5),
        AttentionPlan.of_layout(FOREST, CPU),
    )
    many = everything("cpu", query, table, rows, value_width=4)
    selected = select_rows(index, index.key, plan, num_selected=5, backend="cpu")
    monkeypatch.setattr(gathered_attention, "GATHERED_FLOATS", 1)
    monkeypatch.setattr(key_selection, "SCORED_FLOATS", 1)
    for ours, expected in zip(
        everything("cpu", query, table, rows, value_width=4), many, strict=True
    ):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)
    assert torch.equal(select_rows(index, index.key, plan, num_selected=5, backend="cpu"), selected)


def test_without_being_asked_the_device_decides(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert backend_for(torch.zeros(1)) == "cpu"
    monkeypatch.setenv(VARIABLE, "reference")
    assert backend_for(torch.zeros(1)) == "reference"
    assert backend_for(torch.zeros(1), "cpu") == "cpu"


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_decoding_in_single_precision_takes_the_back_end_too(backend, monkeypatch):
    monkeypatch.setenv(VARIABLE, backend)
    cache = build_model(small_glm(), seed=0).new_cache(1, 8)
    assert isinstance(cache, NativeDecoder) == (backend == "cpu" and native() is not None)


def test_an_unknown_back_end_is_refused_with_those_there_are(monkeypatch):
    monkeypatch.setenv(VARIABLE, "cuda")
    with pytest.raises(ConfigError, match=r"no attention back-end 'cuda'.*reference, cpu, triton"):
        backend_for(torch.zeros(1))


def test_triton_that_is_missing_is_refused_with_the_fix(monkeypatch):
    monkeypatch.setattr("longarc.models.sparse_attention.find_spec", lambda _: None)
    with pytest.raises(ResourceError, match="triton is not installed; pip install"):
        backend_for(torch.zeros(1), "triton")


@needs_triton
def test_triton_on_a_processor_is_refused_unless_interpreted(monkeypatch):
    from triton import knobs

    monkeypatch.setattr(knobs.runtime, "interpret", False)
    with pytest.raises(ResourceError, match=r"tensors are on cpu.*TRITON_INTERPRET=1"):
        backend_for(torch.zeros(1), "triton")


@needs_triton
def test_bf16_in_tritons_interpreter_is_refused(monkeypatch):
    from triton import knobs

    monkeypatch.setattr(knobs.runtime, "interpret", True)
    with pytest.raises(ResourceError, match=r"nonsense with torch\.bfloat16; choose 'cpu'"):
        backend_for(torch.zeros(1, dtype=torch.bfloat16), "triton")


@pytest.mark.gpu
@needs_triton
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_gpu_computes_the_reference(dtype):
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2}[dtype]
    value, width = (128, 192) if dtype is torch.float64 else (512, 576)
    num_queries, heads, num_rows = 300, 64, 1000
    query, table = draw(num_queries, heads, width) / 4, draw(num_rows, width, seed=1) / 4
    query, table = query.to(dtype), table.to(dtype)
    rows = listed(num_queries, num_rows, 256)
    expected = everything("reference", query.double(), table.double(), rows, value_width=value)
    ours = everything("triton", query.cuda(), table.cuda(), rows.cuda(), value_width=value)
    again = everything("triton", query.cuda(), table.cuda(), rows.cuda(), value_width=value)
    for got, repeated, want in zip(ours, again, expected, strict=True):
        assert torch.equal(got, repeated)
        scale = float(want.abs().max())
        torch.testing.assert_close(got.double().cpu() / scale, want / scale, rtol=0, atol=tolerance)


@pytest.mark.gpu
@needs_triton
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_gpu_selects_the_reference(dtype):
    rows = whole_rows(FOREST.num_tokens, 32, 128, dtype)
    on_gpu = IndexerRows(rows.query.cuda(), rows.key.cuda(), rows.weight.cuda())
    expected = select_rows(
        rows,
        rows.key,
        AttentionPlan.of_layout(FOREST, CPU),
        num_selected=7,
        backend="reference",
    )
    found = select_rows(
        on_gpu,
        on_gpu.key,
        AttentionPlan.of_layout(FOREST, torch.device("cuda")),
        num_selected=7,
        backend="triton",
    )
    assert torch.equal(found.cpu(), expected)
