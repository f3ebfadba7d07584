"""How large a model is and what a token costs, by arithmetic on its config; nothing is allocated."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from longarc.models.families import Anatomy, anatomy_of


@dataclass(frozen=True, slots=True)
class Census:
    """Sums over the parts of a model.

    "Active" are the parameters that take part in computing one token: of the routed experts the chosen
    ones, and no embedding table unless it is the output head too.
    """

    anatomy: Anatomy

    @property
    def num_parameters(self) -> int:
        """All parameters, layers for multi-token prediction included."""
        return self.num_main_parameters + self.num_mtp_parameters

    @property
    def num_main_parameters(self) -> int:
        """All parameters without the layers for multi-token prediction."""
        return sum(part.size * part.copies for part in self.anatomy.parts)

    @property
    def num_mtp_parameters(self) -> int:
        """Parameters of the layers for multi-token prediction; embedding and head are the main model's."""
        return sum(part.size * part.mtp_copies for part in self.anatomy.parts)

    @property
    def num_active_parameters(self) -> int:
        """Active parameters of the main model, output head included."""
        return sum(part.size * part.copies_per_token for part in self.anatomy.parts)

    def num_flops_per_token(self, context_length: int) -> int:
        """Forward pass of one token that has ``context_length`` keys before it, itself included [FLOP].

        Two per active parameter, and what the token computes for each key: reading keys costs no
        parameter, but with a long context most of the time. Norms, rotation and softmax are left out.
        """
        reads = sum(
            read.flops_per_key * read.num_keys(context_length) for read in self.anatomy.reads
        )
        return 2 * self.num_active_parameters + reads


def take_census(raw: Mapping[str, Any]) -> Census:
    """Count what a Hugging Face ``config.json`` describes.

    Raises:
        ConfigError: the family is not known here, or a field is missing or wrong.
    """
    return Census(anatomy_of(raw))
