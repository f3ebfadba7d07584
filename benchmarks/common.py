"""What the benchmarks share: the table they print, and the models that peers are measured on."""

from longarc.config.model import LlamaConfig

LLAMA = LlamaConfig(
    hidden_size=256,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=2,
    intermediate_size=688,
)
"""Five million parameters in a shape that every library has."""

DEEP_LLAMA = LlamaConfig(
    hidden_size=192,
    num_hidden_layers=12,
    num_attention_heads=3,
    num_key_value_heads=1,
    intermediate_size=512,
)
"""Five million parameters in the proportions of SmolLM2-135M: deep and thin, a third of its width."""


class Table:
    """Prints ``figure | ours | peer | ratio | bar`` row by row, and last how many bars hold."""

    def __init__(self) -> None:
        self._num_bars = self._num_held = 0
        print("figure | ours | peer | ratio | bar", flush=True)

    def row(
        self,
        figure: str,
        ours: str,
        *,
        peer: str = "-",
        ratio: float | None = None,
        bar: str = "-",
        holds: bool | None = None,
    ) -> None:
        """Print one row.

        Args:
            figure: what was measured, with its unit.
            ours: the value of LongArc.
            peer: the value of what it is compared with.
            ratio: ours over peer.
            bar: what must be reached.
            holds: whether it is; None where the row has no bar. What could not be measured does not hold.
        """
        self._num_bars += holds is not None
        self._num_held += bool(holds)
        shown = "-" if ratio is None else f"{ratio:.2f}"
        missed = "   MISSED" if holds is False else ""
        print(f"{figure} | {ours} | {peer} | {shown} | {bar}{missed}", flush=True)

    def close(self) -> bool:
        """Print the last line; return whether every bar holds."""
        print(f"bars: {self._num_held} of {self._num_bars} hold", flush=True)
        return self._num_held == self._num_bars
