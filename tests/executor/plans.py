"""Decisions to test with: any, and some of everything."""

import dataclasses

import torch
from hypothesis import strategies as st
from training import Task, decide, units_of

from planner.decisions import Place

ACTIVATIONS = ["keep", "recompute", "offload", "offload-nvme"]

PLACES = {
    "gpu": [Place.CPU, Place.STREAM, Place.NVME, Place.GPU],
    "host": [Place.CPU, Place.STREAM, Place.NVME],
    "nvme": [Place.NVME],
}


@st.composite
def plans(
    draw,
    sizes=(1,),
    grains=(977, 3000, 100_000),
    families=("gpt2", "llama"),
    degrees=None,
    optimizers=("adamw",),
    freezes=False,
    **given,
):
    """Any plan: per unit, per piece, and all settings; for as many data-parallel ranks as one of ``sizes``.

    If it ``freezes``, some parameters are planned as frozen: all of some units, and any of others.

    Of the task, what is ``given`` stays, and of its clipping nothing is drawn then. Plans that speculate never clip, so
    that nothing is taken back. If products in fp8 are planned by
    formulas, weights may be fetched in fp8.
    """
    size = draw(st.sampled_from(sizes))
    zero_stage = draw(st.integers(0, 3)) if size > 1 else 0
    fetches = zero_stage in {0, 3}  # hosts that have only what they update cannot serve the rest
    clip = True if given else draw(st.booleans())
    num_micro_batches = draw(st.integers(1, 3))
    optimizer = draw(st.sampled_from(optimizers))
    speculates = clip and not given and optimizer == "adamw" and draw(st.booleans())
    drawn = {
        "family": draw(st.sampled_from(families)),
        "optimizer": optimizer,
        "dtype": draw(st.sampled_from([torch.bfloat16, torch.float32])),
        "splits": draw(st.booleans()),
        "num_micro_batches": num_micro_batches,
        "max_norm": (1e6 if speculates else 0.5) if clip else None,
        "iterations": 3,
        "group_sizes": tuple(draw(st.lists(st.integers(1, num_micro_batches), min_size=3, max_size=3))),
    }
    if "iterations" in given:  # whose loop decides by itself how many micro-batches come
        del drawn["group_sizes"]
    task = Task(**drawn | given)
    if freezes:
        task = dataclasses.replace(task, frozen=draw(_frozen(task)))
    ways = draw(st.lists(st.sampled_from(ACTIVATIONS), min_size=3, max_size=3))

    def choose(unit, count):
        params = draw(st.sampled_from(["gpu", "host", "nvme"])) if fetches else "gpu"
        places = PLACES[params]
        activations = ways[_layer(unit)] if unit.in_layer else "keep"
        update = draw(st.lists(st.sampled_from(places), min_size=count, max_size=count))
        return params, activations, update, draw(st.sampled_from(["gpu", "host"]))

    return task, decide(
        task,
        choose,
        data_parallel=size,
        **degrees or {},
        zero_stage=zero_stage,
        collectives=draw(st.sampled_from([None, "host"])) if size > 1 else None,
        subgroup_params=draw(st.sampled_from(grains)),
        num_param_slots=draw(st.integers(1, 3)),
        num_state_slots=draw(st.integers(1, 3)),
        num_nvme_slots=draw(st.integers(1, 3)),
        num_activation_slots=draw(st.integers(1, 3)),
        num_gradient_slots=draw(st.integers(1, 3)),
        spill_gradients=draw(st.booleans()),
        update_order=draw(st.sampled_from(["forward", "backward"])),
        update_start=draw(st.sampled_from(["step", "backward"] if speculates or not clip else ["step"])),
        speculate=speculates or None,
        overlap_next_forward=draw(st.booleans()),
        fp8_weights=draw(st.sampled_from([True, True, None])) if task.products == "fp8" else None,
    )


@st.composite
def _frozen(draw, task):
    found = units_of(task)
    ways = draw(st.lists(st.sampled_from(["all", "some", "none"]), min_size=len(found), max_size=len(found)))
    frozen = {
        spec.name
        for unit, way in zip(found, ways, strict=True)
        for spec in unit.parameters
        if way == "all" or (way == "some" and draw(st.booleans()))
    }
    names = sorted(spec.name for unit in found for spec in unit.parameters)
    return frozenset(frozen - {draw(st.sampled_from(names))})  # something is trained


def _layer(unit) -> int:
    return int(unit.segment.rpartition(".")[2])


def mixed(unit, count):
    """Return a bit of everything, changing from unit to unit and within units."""
    turn = sum(unit.name.encode())
    params = ["gpu", "host", "nvme"][turn % 3]
    places = PLACES[params]
    return (
        params,
        ["offload", "recompute", "offload-nvme", "keep"][min(_layer(unit), 3)] if unit.in_layer else "keep",
        [places[(turn + i) % len(places)] for i in range(count)],
    )
