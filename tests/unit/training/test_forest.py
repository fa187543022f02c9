"""The prefix forest: rows are paths, only what agrees is shared, and the gradient is that of the flat rows."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from polar_gym.builders import build_trajectory
from polar_gym.schema import BuilderSpec, ModelCall, WeightVersion
from polar_gym.training import Row, make_batch
from polar_gym.training.conformance import LOSSES, Step, check, holds, train_arrays
from polar_gym.training.forest import forest, packed
from polar_gym.training.trl import rollout_samples
from tests.support import call_trees, trainers
from tests.support.calls import make_call
from tests.support.episodes import make_episode
from tests.support.forests import ForestForward, row_of, seen

needs_trl = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None,
    reason="torch is not here; `make test` runs these on the interpreter that has it",
)
needs_areal = pytest.mark.skipif(
    importlib.util.find_spec("areal") is None, reason="AReaL is in no registry; see tests/support/trainers.py"
)


def versions(*names: str | None) -> list[WeightVersion]:
    """Return the span of each token that has a version."""
    return [WeightVersion(version=name, start=at, end=at + 1) for at, name in enumerate(names) if name]


@st.composite
def rows(draw: st.DrawFn, *, with_records: bool = True) -> list[Row]:
    """Draw rows of a tiny vocabulary, many of which begin as an earlier one does, with other records or the same."""
    drawn: list[Row] = []
    routed = with_records and draw(st.booleans())
    for _ in range(draw(st.integers(0, 7))):
        ids = draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))
        if drawn and draw(st.booleans()):
            ids = [*draw(st.sampled_from(drawn)).token_ids.tolist(), *ids][: draw(st.integers(1, 12))]
        names = draw(st.lists(st.sampled_from([None, None, "7", "8"]), min_size=len(ids), max_size=len(ids)))
        chosen = draw(st.lists(st.sampled_from([0, 0, 0, 1]), min_size=len(ids) - 1, max_size=len(ids) - 1))
        fields: dict[str, Any] = {"weight_versions": versions(*names)} if with_records else {}
        if routed and draw(st.integers(0, 3)):
            fields["routed_experts"] = np.array(chosen, np.int16).reshape(-1, 1, 1)
        drawn.append(row_of(ids, **fields))
    return drawn


def prefixes(of: Sequence[Row]) -> set[tuple[int, ...]]:
    return {tuple(row.token_ids[:end].tolist()) for row in of for end in range(1, len(row.token_ids) + 1)}


def record(row: Row, at: int) -> tuple[Any, Any]:
    """Return the version and the experts of a token, None where the row does not have them."""
    version = [span.version for span in row.weight_versions if span.start <= at < span.end]
    if row.routed_experts is None:
        return (version or [None])[0], "never recorded"
    return (version or [None])[0], row.routed_experts[at].tolist() if at < len(row.routed_experts) else None


@effort(max_examples=60)
@given(drawn=rows())
def test_the_rows_come_back(drawn: list[Row]) -> None:
    """Each token of each row is in the forest once, at its position, and sees the row's tokens before it and itself."""
    found = forest(drawn)
    tree = packed(found)
    visible = seen(tree)
    assert found.flat_tokens == sum(len(row.token_ids) for row in drawn)
    assert found.tokens == len(tree["input_ids"])
    assert sorted(found.order) == list(range(len(drawn)))
    for row, line in zip(drawn, tree["places"], strict=True):
        places = line[: len(row.token_ids)]
        assert tree["input_ids"][places].tolist() == row.token_ids.tolist()
        assert tree["position_ids"][places].tolist() == list(range(len(places)))
        for position, place in enumerate(places):
            assert np.flatnonzero(visible[place]).tolist() == places[: position + 1].tolist()


@effort(max_examples=60)
@given(drawn=rows())
def test_tokens_are_shared_only_where_all_records_agree(drawn: list[Row]) -> None:
    """Also between two rows that both agree with a third, which has no record there."""
    places = packed(forest(drawn))["places"]
    for one, ours in zip(drawn, places, strict=True):
        for other, theirs in zip(drawn, places, strict=True):
            for at in range(min(len(one.token_ids), len(other.token_ids))):
                if ours[at] == theirs[at]:
                    for mine, its in zip(record(one, at), record(other, at), strict=True):
                        assert mine == its or None in (mine, its)


@given(drawn=rows(with_records=False))
def test_every_prefix_is_there_once(drawn: list[Row]) -> None:
    """Guards against a prefix that two branches have: the counts would be too low."""
    found = forest(drawn)
    assert found.tokens == len(prefixes(drawn))
    assert found.saving == (found.flat_tokens / found.tokens if drawn else 1.0)
    ordered = forest([drawn[place] for place in found.order])
    assert ordered.order == list(range(len(drawn)))


@pytest.mark.parametrize(
    ("other", "tokens"),
    [(("7", "7"), 4), ((None, "7"), 4), (("8", "8"), 6), (("7", "8"), 5)],
    ids=["same", "as context", "other weights", "updated between"],
)
def test_a_prompt_is_shared_and_what_other_weights_sampled_is_not(other: tuple[str | None, ...], tokens: int) -> None:
    drawn = [
        row_of([1, 2, 3, 4], weight_versions=versions(None, None, "7", "7")),
        row_of([1, 2, 3, 4], weight_versions=versions(None, None, *other)),
    ]
    assert forest(drawn).tokens == tokens


def test_a_missing_record_joins_no_two_others() -> None:
    """Guards against a row without a record in whose node two versions meet."""
    drawn = [row_of([1, 2], weight_versions=versions(None, name)) for name in (None, "7", "8")]
    assert forest(drawn).tokens == 3


@given(calls=call_trees.sessions())
def test_the_forest_does_not_depend_on_the_builder(calls: list[ModelCall]) -> None:
    assert len({forest(batch_rows(calls, builder)).tokens for builder in ("prefix_merging", "per_request")}) == 1


def batch_rows(calls: list[ModelCall], builder: str) -> list[Row]:
    """Return the rows of a group: a session of these calls, one that begins alike, and one of its own."""
    trajectory = build_trajectory(calls, BuilderSpec(name=builder))
    one = make_episode("a", 1.0, calls).model_copy(update={"trajectory": trajectory})
    alike = [make_call(0, [*calls[0].prompt_ids.tolist(), 5], [2, 3])] if calls else []
    return make_batch([one, make_episode("b", 0.5, alike), make_episode("c", 0.0, [make_call(0, [1], [2, 3])])]).rows


@pytest.mark.parametrize("seed", range(2))
def test_the_trees_gradient_obeys_the_law(tiny_gpt2: Any, seed: int) -> None:
    """Every loss and weighting, over rows in any split, with their prefixes shared: the whole sessions' gradient."""
    savings: list[float] = []

    def train(model: Any, step: Step) -> None:
        tree = ForestForward(model)
        train_arrays(tree, step)
        savings.extend(tree.savings)

    findings = check(train, tiny_gpt2, vocabulary=32, seed=seed)
    assert len(findings) == 4 * 2 * 5
    assert holds(findings), findings
    assert max(savings) > 1.2, "rows share prefixes"


@effort(max_examples=10)
@given(
    calls=call_trees.sessions(),
    builder=st.sampled_from(["prefix_merging", "per_request"]),
    loss=st.sampled_from(sorted(LOSSES)),
)
def test_the_trees_gradient_is_the_flat_one(tiny_gpt2: Any, calls: list[ModelCall], builder: str, loss: str) -> None:
    torch: Any = importlib.import_module("torch")
    drawn, gradients = batch_rows(calls, builder), []
    for model in (tiny_gpt2, ForestForward(tiny_gpt2)):
        tiny_gpt2.zero_grad()
        train_arrays(model, Step(ranks=[[drawn]], loss=loss, weighting="token"))
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in tiny_gpt2.parameters()]))
    assert torch.norm(gradients[0] - gradients[1]) <= 1e-6 * torch.norm(gradients[0])


@needs_trl
@given(drawn=rows(with_records=False))
def test_trl_packs_the_forest_of_our_samples(drawn: list[Row]) -> None:
    """TRL's trees hold each token with its successor: one token more for each further branch."""
    tree = importlib.import_module("trl.experimental.async_grpo.packing").TreeRow()
    drawn = [row for row in drawn if row.trainable_tokens]
    for sample in rollout_samples(drawn, model_version=0):
        tree.add(sample)
    longer = {prefix for prefix in prefixes(drawn) if len(prefix) > 1}
    whole = {tuple(row.token_ids.tolist()) for row in drawn}
    assert len(tree.tokens) == len(longer) + len(whole)


@needs_areal
@pytest.mark.parametrize("weighting", ["token", "session"])
def test_areals_trees_obey_the_law(tiny_gpt2: Any, weighting: Any) -> None:
    """AReaL's own tries, masks, positions and logprobs, of our arrays."""
    findings = check(
        trainers.areal_trees, tiny_gpt2, vocabulary=32, losses={"ppo": LOSSES["ppo"]}, weightings=[weighting]
    )
    assert holds(findings), findings


@needs_areal
def test_areals_trees_share_more_in_depth_first_order() -> None:
    """Guards against an order that breaks up what shares a prefix: AReaL fills its trees in the order that it gets."""
    random = np.random.default_rng(0)
    drawn = [row_of([group, *[5] * 60, *random.integers(0, 30, 40)]) for group in range(8) for _ in range(6)]
    shuffled = [drawn[place] for place in random.permutation(len(drawn))]
    found = forest(shuffled)
    ordered = [shuffled[place] for place in found.order]
    assert trainers.areal_tokens(shuffled, per_tree=128 * 64) == found.tokens
    assert trainers.areal_tokens(ordered, per_tree=512) < 0.75 * trainers.areal_tokens(shuffled, per_tree=512)
