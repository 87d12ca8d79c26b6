"""Divides steps among clients if not all requests fit, so that an expensive client delays only itself.

A client is an authenticated tenant with a weight. Max-min fairness divides the sequences of a step: a client
that needs less than its part gets all it needs, and the others share the rest by weight. A client's sequences
are divided among its requests in the same way.

The tokens of prompts go first to the client that will have the fewest computed tokens, in relation to its
weight, once its prompts are computed (``fairness/shares.py``), also those that waited in the router. So of
two clients with equal numbers, the one that asks for less is served first. A client that floods gets what the
others leave. While a request of another client could come before its next prompts, even one that has yet to
arrive, it also gets at most a quarter of a step, so that this request waits for a short one.

A request needs blocks to run, and keeps them while a step leaves it out. This file does not decide who gets
blocks: that is the order of arrival, or of the clients' blocks (``fair_blocks.py``).

* A step may leave out some samples of a request, but it must compute the beams of a beam search together. So
  each step begins with the request that was left out longest, and computes all its beams if it is a beam
  search. The number of steps in a row that leave out a request is at most the number of other running
  requests.
* If a step has no room for all sequences of a waiting request, the request may still start if its client has
  less than its share. The step then computes some of the sequences. If its client already has its share, the
  request may start under two conditions: the client has a larger running request, and the request is so small
  that its own share covers all of its sequences.
* A request overtakes waiting requests of its client only while the client has a larger running request that
  is older than these. A request is therefore overtaken for at most the length of one answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quire.engine.scheduling.fair_blocks import FairBlocks
from quire.engine.scheduling.group_queues import GroupQueues
from quire.engine.scheduling.sequence_group import SequenceGroup
from quire.engine.sequences.block_tables import BlockTables
from quire.engine.sequences.sequence import ScheduledSequence
from quire.fairness.shares import ServedTokens, fair_shares

Turns = Mapping[SequenceGroup, int]
"""How many sequences of each group a step may compute."""


CREDIT_STEPS = 64
"""A client that returns is served at once as much as it lagged behind, at most this many full steps."""
SHORT_STEP = 4
"""A client that is ahead of another one gets a step's tokens divided by this at most."""


@dataclass(eq=False)
class FairTurns:
    """Divides steps.

    Attributes:
        queues: the groups.
        fair_blocks: determines their order.
        tables: the ledger of their blocks, which knows what is cached.
        max_num_seqs: most sequences in a step.
        max_num_batched_tokens: most tokens in a step.
    """

    queues: GroupQueues
    fair_blocks: FairBlocks
    tables: BlockTables
    max_num_seqs: int
    max_num_batched_tokens: int

    def __post_init__(self) -> None:
        self.num_short_tokens = max(1, self.max_num_batched_tokens // SHORT_STEP)
        """Most tokens of prompts in a step for clients that are ahead of others."""
        self._served = ServedTokens[str](CREDIT_STEPS * self.max_num_batched_tokens)
        self._num_divided = 0

    def divide_sequences(self, *, with_waiting: bool = True) -> Turns | None:
        """Return the turns of running groups, and of waiting groups that start although there is no room.

        None means that all running groups fit, and that no waiting group may start in this way.
        """
        running = self.queues.running
        num_slots = sum([group.num_slots for group in running])
        starting = self._entitled(num_slots) if with_waiting and self.queues.waiting else []
        if num_slots <= self.max_num_seqs and not starting:
            return None
        self._num_divided += 1
        for group in starting:
            group.turn = group.turn or self._num_divided
        ordered = sorted((*running, *starting), key=lambda group: (group.turn, group.arrival))
        turns = divided(ordered, self.max_num_seqs)
        for group, num_sequences in turns.items():
            if num_sequences:
                group.turn = self._num_divided
        return turns

    def divide_tokens(self) -> dict[str, int] | None:
        """Return how many tokens a step may compute for each client; None means that all tokens fit.

        Only tokens of prompts are limited: each running sequence may decode.
        """
        served, size = self._served, self.max_num_batched_tokens
        clients = self.queues.clients
        for client in clients:
            served.join(client)
        if len(clients) < 2 and served.lowest(but=clients) is None:
            return None
        decoding, prompts, backlogs, weights = self._demands()
        left = size - decoding.total()
        if left <= 0:
            return None
        levels = {c: served.level(c) + min(backlogs[c] / weights[c], served.credit) for c in prompts}
        lowest = served.lowest(but={client for client in prompts if backlogs[client] >= left})
        ahead = {c: n for c, n in prompts.items() if lowest is not None and levels[c] > lowest + size}
        if prompts.total() <= left and not ahead:
            return None
        shares = fair_shares(prompts, left, weights, levels)
        num_ahead = min(sum(shares[client] for client in ahead), self.num_short_tokens)
        others = {client: n for client, n in prompts.items() if client not in ahead}
        shares = fair_shares(ahead, num_ahead, weights, levels)
        shares |= fair_shares(others, left - num_ahead, weights, levels)
        return {client: decoding[client] + shares[client] for client in prompts}

    def _demands(self) -> tuple[Counter[str], Counter[str], Counter[str], dict[str, int]]:
        """Return each client's tokens to decode, of its next prompts, and of all its prompts; and weights."""
        decoding: Counter[str] = Counter()
        prompts: Counter[str] = Counter()
        weights: dict[str, int] = {}
        elsewhere: Counter[str] = Counter()
        for group in self.queues.running:
            num_decoding = min(group.num_uncomputed_tokens, len(group.sequences))
            decoding[group.client] += num_decoding
            prompts[group.client] += group.num_uncomputed_tokens - num_decoding
            weights[group.client] = group.weight
            elsewhere[group.client] = max(elsewhere[group.client], group.prompt.num_waiting_tokens)
        backlogs = prompts + self.queues.num_waiting_tokens
        seen: set[str] = set()
        for group in self.fair_blocks.in_order(self.queues.waiting):
            client = group.client
            if group.is_loading or client in seen:
                continue
            seen.add(client)
            if group.lack is None and group.awaited is None:
                num_tokens = self._num_uncached_tokens(group)
                prompts[client] += num_tokens
                backlogs[client] += num_tokens - group.num_uncomputed_tokens
                weights[client] = group.weight
            elsewhere[client] = max(elsewhere[client], group.prompt.num_waiting_tokens)
            if len(seen) == len(self.queues.clients):
                break
        return decoding, prompts, backlogs + elsewhere, weights

    def record_step(self, scheduled: Sequence[ScheduledSequence]) -> None:
        """Count the tokens that a step computes for each client."""
        tokens: dict[str, int] = {}
        weights: dict[str, int] = {}
        for sequence, num_tokens in scheduled:
            tokens[sequence.client] = tokens.get(sequence.client, 0) + num_tokens
            weights[sequence.client] = sequence.weight
        for client, num_tokens in tokens.items():
            self._served.serve(client, num_tokens, weights[client])

    def _entitled(self, num_slots: int) -> list[SequenceGroup]:
        """Return the waiting groups for which there is no room, but which may start nevertheless."""
        running, num_clients = self.queues.running, len(self.queues.clients)
        if num_clients < 2 and num_slots >= self.max_num_seqs and all(g.num_slots == 1 for g in running):
            return []
        entitled: list[SequenceGroup] = []
        most: dict[str, int] = {}  # sequences that a group may have to pass older ones of its client
        for group in self.fair_blocks.in_order(self.queues.waiting):
            if group.is_loading or group.num_slots > most.get(group.client, group.num_slots):
                continue
            if num_slots + group.num_slots <= self.max_num_seqs and not entitled and not most:
                return []  # it fits, and the next ones may fit too
            if may_start(group, (*running, *entitled), self.max_num_seqs):
                entitled.append(group)
                continue
            older = (g for g in running if g.client == group.client and g.arrival < group.arrival)
            most[group.client] = min(max((g.num_slots for g in older), default=0), group.num_slots) - 1
            if len(most) == num_clients and max(most.values()) <= 0:
                break
        return entitled

    def _num_uncached_tokens(self, group: SequenceGroup) -> int:
        """Return how many tokens a step computes at most for a waiting group."""
        prompt = group.sequences[0]
        if group.holds_blocks or group.swapped is not None:
            return group.num_uncomputed_tokens
        return prompt.num_tokens - self.tables.num_cached_tokens(prompt, prompt.num_tokens - 1)


def may_start(group: SequenceGroup, running: Sequence[SequenceGroup], capacity: int) -> bool:
    """Return whether a group may start although running groups leave too few of ``capacity`` sequences."""
    slots_of = {other: other.num_slots for other in running}
    clients: Counter[str] = Counter()
    for other, num_slots in slots_of.items():
        clients[other.client] += num_slots
    used = clients[group.client]
    clients[group.client] += group.num_slots
    weights = {other.client: other.weight for other in (*running, group)}
    share = fair_shares(clients, capacity, weights)[group.client]
    if used < share:
        return True
    own = {other: num_slots for other, num_slots in slots_of.items() if other.client == group.client}
    if max(own.values(), default=0) <= group.num_slots:
        return False
    return fair_shares({**own, group: group.num_slots}, share)[group] == group.num_slots


def divided(ordered: Sequence[SequenceGroup], capacity: int) -> Turns:
    """Return the turns of groups; ``groups`` begins with the group that was left out longest.

    Client a has a request for 64 samples and one for 1 sample, client b one for 4; a step computes 16
    sequences::

        clients    a 12, b 4
        groups     a1 11 of 64, a2 1 of 1, b1 4 of 4
    """
    first = ordered[0]
    turns = dict.fromkeys(ordered, 0)
    if first.beam is not None:
        turns[first] = first.num_slots
    clients: dict[str, dict[SequenceGroup, int]] = {}
    for group in ordered:
        if not turns[group]:
            clients.setdefault(group.client, {})[group] = group.num_slots
    demands = {client: sum(slots.values()) for client, slots in clients.items()}
    weights = {group.client: group.weight for group in ordered}
    shares = fair_shares(demands, capacity - turns[first], weights)
    for client, slots in clients.items():
        for group, share in fair_shares(slots, shares[client]).items():
            turns[group] = share if group.beam is None or share == group.num_slots else 0
    num_left = capacity - sum(turns.values())
    for group in ordered:
        missing = group.num_slots - turns[group]
        if group.beam is None or missing <= num_left:
            turns[group] += (added := min(missing, num_left))
            num_left -= added
    return turns
