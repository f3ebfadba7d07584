import math

import pytest

from longarc.errors import ContractError, EngineError
from longarc.gateway.completion import collect
from longarc.records.sampling import SampledTokens, Sampling


def piece(ids, *, logprobs=None, version=0, finish=None, routing=()):
    return SampledTokens(
        token_ids=tuple(ids),
        logprobs=tuple([-1.0] * len(ids) if logprobs is None else logprobs),
        policy_version=version,
        finish_reason=finish,
        routing=routing,
    )


class Pieces:
    """An engine that streams exactly these pieces, through an iterator that is no generator."""

    def __init__(self, *pieces):
        self.pieces = list(pieces)
        self.is_closed = False

    def stream(self, prompt_ids, sampling, *, session_id):
        return self

    def __aiter__(self):
        return self

    async def __anext__(self):
        if not self.pieces:
            raise StopAsyncIteration
        return self.pieces.pop(0)


class ClosablePieces(Pieces):
    async def aclose(self):
        self.is_closed = True


async def collected(engine, check=lambda: None, *, prompt=(1,), **sampling):
    asked = Sampling(max_new_tokens=9, **sampling)
    return await collect(engine, prompt, asked, session_id="s", check=check)


async def test_pieces_are_joined_and_equal_versions_become_one_run():
    engine = ClosablePieces(
        piece([1, 2], version=3),
        piece([3], version=3),
        piece([], version=4),
        piece([4], version=4, finish="stop"),
        piece([5]),
    )
    completion = await collected(engine)
    assert completion.sampled_ids.tolist() == [1, 2, 3, 4]
    assert completion.version_runs == ((3, 3), (4, 1))
    assert engine.is_closed


async def test_an_iterator_that_cannot_be_closed_is_fine():
    completion = await collected(Pieces(piece([1], finish="length")))
    assert completion.finish_reason == "length"


@pytest.mark.parametrize(
    ("pieces", "error", "match"),
    [
        ([], EngineError, "after 0 pieces with finish reason None"),
        ([piece([1])], EngineError, "finish reason None"),
        ([piece([1], finish="cancelled")], EngineError, "finish reason cancelled"),
        ([piece([], finish="stop")], EngineError, "without a token"),
        ([piece([1, 2], logprobs=[-1.0], finish="stop")], ContractError, "2 ids with 1 log-prob"),
        ([piece([1], logprobs=[math.nan], finish="stop")], EngineError, "token 0 is nan"),
        ([piece([1]), piece([2], logprobs=[-math.inf], finish="stop")], EngineError, "token 1 is -inf"),
    ],
)  # fmt: skip
async def test_a_stream_that_is_no_completion_is_refused(pieces, error, match):
    with pytest.raises(error, match=match):
        await collected(Pieces(*pieces))


async def test_a_failing_check_closes_the_stream():
    engine = ClosablePieces(piece([1]), piece([2], finish="stop"))

    def check():
        raise EngineError("enough")

    with pytest.raises(EngineError, match="enough"):
        await collected(engine, check)
    assert engine.is_closed


async def test_what_tokens_were_drawn_from_is_joined_or_absent():
    one = SampledTokens(token_ids=(1, 2), logprobs=(-1.0, -1.0), policy_version=0)
    two = SampledTokens(
        token_ids=(3,), logprobs=(-1.0,), policy_version=0, kept_ids=((3, 8),), finish_reason="stop"
    )
    assert (await collected(Pieces(one, two))).kept_ids == ((), (), (3, 8))
    assert (await collected(Pieces(piece([1], finish="stop")))).kept_ids == ()


async def test_kept_ids_of_some_tokens_of_a_piece_are_refused():
    odd = SampledTokens(
        token_ids=(1, 2),
        logprobs=(-1.0, -1.0),
        policy_version=0,
        kept_ids=((1,),),
        finish_reason="stop",
    )
    with pytest.raises(ContractError, match="2 ids and said of 1"):
        await collected(Pieces(odd))


async def test_routing_is_of_each_position_from_the_first_that_was_asked_for():
    pieces = piece([1, 2], routing=(b"a", b"b", b"c")), piece([3], routing=(b"d",), finish="stop")
    # Of the prompt's 3 tokens the second and third, and of the sampled ones all but the last.
    completion = await collected(Pieces(*pieces), prompt=[7, 8, 9], returns_routing_from=1)
    assert completion.routing == (b"a", b"b", b"c", b"d")


@pytest.mark.parametrize(
    ("routing", "first"), [((), 0), ((b"a",), 0), ((b"a", b"b", b"c"), 0), ((b"a", b"b"), None)]
)
async def test_routing_of_more_or_fewer_positions_than_were_asked_for_is_refused(routing, first):
    engine = Pieces(piece([1, 2], routing=routing, finish="stop"))
    with pytest.raises(
        ContractError,
        match=rf"said of {len(routing)} positions .* asked was {0 if first is None else 2}",
    ):
        await collected(engine, returns_routing_from=first)
