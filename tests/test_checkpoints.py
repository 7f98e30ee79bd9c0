"""Checkpoints of an earlier version load, and training goes on to the weights that it got."""

import copy

import pytest

import checkpoints
from cases import assert_same

# What a release of torch adds to the groups is no business of ours.
OF_TORCH = {"foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"}


SAVED = checkpoints.read()


def comparable(state):
    """`state` without those options of the groups that depend on torch's release."""
    optimizer = dict(state["optimizer"])
    optimizer["param_groups"] = [
        {key: value for key, value in group.items() if key not in OF_TORCH}
        for group in optimizer["param_groups"]
    ]
    return {**state, "optimizer": optimizer}


def test_no_training_of_the_earlier_version_is_left_out():
    assert SAVED.keys() <= checkpoints.TRAININGS.keys()
    assert len(SAVED) >= 42


@pytest.mark.parametrize("title", SAVED)
def test_resuming_an_earlier_versions_checkpoint_gives_its_weights(title):
    training = checkpoints.start(title)
    training.load(copy.deepcopy(SAVED[title]["middle"]))  # optimizers keep what they load
    training.train(checkpoints.SAVED_AFTER, checkpoints.STEPS)
    assert_same(training.state()["model"], SAVED[title]["end"])


@pytest.mark.parametrize("title", SAVED)
def test_checkpoints_are_written_as_the_earlier_version_wrote_them(title):
    training = checkpoints.start(title)
    training.train(0, checkpoints.SAVED_AFTER)
    assert_same(comparable(training.state()), comparable(SAVED[title]["middle"]))
