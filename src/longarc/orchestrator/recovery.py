"""What a stage finds in the ledger when it starts: finished rollouts to use, lost ones to run again."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from longarc.errors import ContractError
from longarc.orchestrator.inflight import InflightGroup, Member, next_attempt, place_id
from longarc.records.outcome import Disposition, Outcome
from longarc.records.trajectory import Admission
from longarc.runs.ledger import Ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """Where a stage stood when its process ended."""

    first_step: int
    """Steps that are recorded [optimizer steps]; the stage continues with this index."""
    num_groups_admitted: int
    """Tasks drawn from the mixture."""
    groups: tuple[InflightGroup, ...]
    """Groups without a fate, by age; members without a trajectory have to be run."""


def recover(ledger: Ledger, stage: str, *, policy_version: int, run_seed: int) -> Recovered:
    """Rebuild the groups in flight and admit again whatever the end of the process cut off.

    Trajectories that ended before rejoin their groups, so nothing is sampled or trained twice and
    slow tasks are not lost to the restart.

    Raises:
        ContractError: the weights are not those that the last recorded step left.
    """
    steps = ledger.steps(stage)
    if steps and steps[-1].policy_version != policy_version:
        raise ContractError(
            f"stage {stage!r}: the ledger's last step ({steps[-1].step}) left weights of version "
            f"{steps[-1].policy_version}, but the trainer holds version {policy_version}. Load the "
            f"checkpoint of that step, or replay the recorded batches since the checkpoint."
        )
    lost = {admission.trajectory_id: admission for admission in ledger.cancel_open(stage)}
    pending = {trajectory.id: trajectory for trajectory in ledger.pending(stage)}

    too_old = ledger.rows(stage=stage, outcome=Outcome.CANCELLED_STALE)
    stale_places = {place_id(row.id) for row in too_old}

    groups: list[InflightGroup] = []
    retries: list[Admission] = []
    half_decided: set[str] = set()
    for index, places in sorted(_places(ledger, stage, lost.keys() | pending.keys()).items()):
        known = {place.trajectory_id for place in places.values()}
        if not known <= lost.keys() | pending.keys():
            half_decided |= known & pending.keys()
            continue
        members: list[Member] = []
        for _, newest in sorted(places.items()):
            member = Member(
                newest,
                trajectory=pending.get(newest.trajectory_id),
                was_stale=place_id(newest.trajectory_id) in stale_places,
            )
            if member.trajectory is None:
                member.admission = next_attempt(
                    newest, policy_version=policy_version, run_seed=run_seed
                )
                retries.append(member.admission)
            members.append(member)
        groups.append(InflightGroup(index, tuple(members)))
    ledger.admit(retries)
    # Only a stage that was over and is continued has such groups: the rest was cancelled at its end.
    reason = "the other members were decided before"
    ledger.dispose(dict.fromkeys(half_decided, (Disposition.GROUP_DROPPED, reason)))
    return Recovered(
        first_step=len(steps),
        num_groups_admitted=ledger.num_groups_admitted(stage),
        groups=tuple(groups),
    )


def close_stage(ledger: Ledger, stage: str) -> None:
    """Give what a finished stage leaves behind its fate: it was sampled for steps that do not come.

    There is something only where a stage became shorter, or allowed less lag, while it was resumed.
    """
    ledger.cancel_open(stage)
    fate = (Disposition.CANCELLED, "the stage was over")
    ledger.dispose({trajectory.id: fate for trajectory in ledger.pending(stage)})


def _places(
    ledger: Ledger, stage: str, undecided: set[str]
) -> Mapping[int, Mapping[int, Admission]]:
    """Return the newest attempt of every place of the groups that have an undecided one."""
    if not undecided:
        return {}
    places: dict[int, dict[int, Admission]] = defaultdict(dict)
    for admission in ledger.admissions(stage):
        current = places[admission.group_index].get(admission.member_index)
        if current is None or admission.attempt > current.attempt:
            places[admission.group_index][admission.member_index] = admission
    return {
        index: members
        for index, members in places.items()
        if any(newest.trajectory_id in undecided for newest in members.values())
    }
