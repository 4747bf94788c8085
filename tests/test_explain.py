"""No layout is a fiction: what the compiler made of each, read from the compiled step."""

import functools
import gc
import math

import jax
import numpy as np
import pytest
from commands import SMALL, call, run

from cnnjax import explain, networks, partition, pipeline
from cnnjax.augment import Augmentation
from cnnjax.datasets.digits import load_digits
from cnnjax.datasets.order import batches
from cnnjax.explain import Collective, Explanation, Machine, Parameter, collectives, device_groups, hlo
from cnnjax.feed import abstract_batch, gather
from cnnjax.losses import Objective
from cnnjax.optim import OptimizerConfig, make_optimizer, make_schedule
from cnnjax.partition import Layout
from cnnjax.step import Recipe
from cnnjax.strategy import compile_steps

SLIM = "cifar10_slim"
SLIM_PARAMETERS = 179_962


def setting(network: str, mesh: str, microbatches: int = 1):
    options = OptimizerConfig("nesterov", 0.05, schedule="cosine", weight_decay=5e-4)
    recipe = Recipe(
        networks.build_cnn(network, 10), make_optimizer(options, 100), make_schedule(options, 100),
        augmentation=Augmentation(True, 4), scaling="unit",
    )  # fmt: skip
    return recipe, Layout(partition.make_mesh(mesh)[0], microbatches), networks.default_input_shape(network)


@functools.cache
def cost(mesh: str, network: str = SLIM, batch_size: int = 128, strategy: str = "jit", microbatches: int = 1):
    recipe, layout, shape = setting(network, mesh, microbatches)
    return explain.explain(recipe, layout, shape, batch_size, strategy)


# ---------------------------------------------------------------------------------------------------------------------
# What the layouts promise
# ---------------------------------------------------------------------------------------------------------------------


def test_the_count_of_parameters_is_the_networks():
    layers = networks.summary(networks.build_cnn(SLIM, 10), (32, 32, 3))
    assert sum(layer.parameters for layer in layers) == SLIM_PARAMETERS
    assert cost("data=1").parameter_bytes == 4 * SLIM_PARAMETERS
    assert cost("data=1").collectives == ()


@pytest.mark.parametrize("strategy", ["jit", *(pytest.param(s, marks=pytest.mark.slow) for s in ("shard_map", "pmap"))])
def test_data_reduces_each_gradient_once_and_together(strategy):
    found = cost("data=4", strategy=strategy).traffic()
    assert list(found) == [(("data",), "all-reduce")]
    sizes = sorted((c.payload * c.times for c in found[("data",), "all-reduce"]), reverse=True)
    assert sum(sizes) == pytest.approx(4 * SLIM_PARAMETERS, rel=0.05)
    assert sum(sizes[:3]) >= 0.95 * 4 * SLIM_PARAMETERS


@pytest.mark.parametrize("strategy", ["jit", pytest.param("shard_map", marks=pytest.mark.slow)])
def test_fsdp_keeps_a_quarter_and_gathers_it_once(strategy):
    found, whole = cost("fsdp=4", strategy=strategy), cost("data=1")
    assert found.parameter_bytes == pytest.approx(whole.parameter_bytes / 4, rel=0.05)
    assert found.optimizer_state == pytest.approx(whole.optimizer_state / 4, rel=0.05)
    traffic = {kind: sum(c.payload for c in group) for (axes, kind), group in found.traffic().items()}
    assert traffic["all-gather"] == pytest.approx(4 * SLIM_PARAMETERS, rel=0.05)
    assert traffic["all-reduce"] + traffic.get("reduce-scatter", 0) == pytest.approx(4 * SLIM_PARAMETERS, rel=0.05)
    assert set(traffic) <= {"all-gather", "all-reduce", "reduce-scatter"}


@pytest.mark.slow
def test_the_state_is_as_large_as_the_arrays():
    recipe, layout, shape = setting(SLIM, "fsdp=4")
    arrays = jax.tree.leaves(compile_steps(recipe, layout, shape).init())
    device = layout.mesh.devices.flat[0]
    held = sum(part.data.nbytes for a in arrays for part in a.addressable_shards if part.device == device)
    assert cost("fsdp=4").state == held


@pytest.mark.parametrize("mesh", ["data=1", "data=4", "fsdp=4", "model=2", "space=2"])
def test_the_memory_is_what_the_compiler_reports(mesh):
    found = cost(mesh)
    assert found.total == pytest.approx(found.compiled, rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "microbatches"), [("data=1", 1), ("space=2", 1), ("fsdp=4", 1), ("data=2", 4)])
def test_memory_at_another_batch_size_is_foreseen(mesh, microbatches):
    small, large = (cost(mesh, batch_size=size, microbatches=microbatches) for size in (64, 512))
    assert small.memory_at(512) == pytest.approx(large.compiled, rel=0.15)


def test_space_exchanges_halos_and_halves_the_activations():
    found, one = cost("space=2"), cost("data=1")
    halos = [c for c in found.collectives if c.kind == "collective-permute"]
    assert halos and all(c.axes == ("space",) and c.shapes[0][1] <= 2 for c in halos)  # rows
    others = {shape for c in found.collectives if c.kind != "collective-permute" for shape in c.shapes}
    flattened = (128, 2, 2, 192)  # of 2x2 positions: the whole input of the dense layer
    assert [shape for shape in others if math.prod(shape) >= 128 * 32] and flattened in others
    assert not [shape for shape in others if 128 in shape and shape != flattened]
    assert found.temporaries <= 0.65 * one.temporaries


@pytest.mark.parametrize(
    ("network", "batch_size"),
    [
        pytest.param(SLIM, 128, marks=pytest.mark.slow),
        ("cnn2d_3layer_fullconnected_3layer", 8),
        pytest.param("resnet18_cifar", 2, marks=pytest.mark.slow),
    ],
)
def test_model_halves_the_work(network, batch_size):
    halved, whole = (cost(mesh, network, batch_size).flops for mesh in ("model=2", "data=1"))
    assert 0.5 * whole <= halved <= 0.6 * whole


@pytest.mark.parametrize("mesh", ["data=1", "data=4", "space=2", "model=2"])
def test_the_compiler_computes_what_the_network_counts(mesh):
    found = cost(mesh)
    assert found.flops == pytest.approx(found.network_flops, rel=0.1)


@pytest.mark.slow
def test_loops_count_as_often_as_they_run():
    """Under jit each micro-batch reduces its gradients; shard_map adds them up first."""
    often, once = (cost("data=2", strategy=s, microbatches=4) for s in ("jit", "shard_map"))
    assert sum(c.payload * c.times for c in often.collectives) == pytest.approx(4 * 4 * SLIM_PARAMETERS, rel=0.1)
    assert sum(c.payload * c.times for c in once.collectives) == pytest.approx(4 * SLIM_PARAMETERS, rel=0.1)
    assert often.flops == pytest.approx(often.network_flops, rel=0.1)
    assert "reduced 4 times" in explain.report(often) and "reduced 4 times" not in explain.report(once)


@pytest.mark.slow
def test_each_axis_has_its_own_traffic():
    found = cost("data=2,model=2,space=2")
    assert {axes for axes, _ in found.traffic()} == {("data",), ("model",), ("space",)}
    gradients = sum(c.payload for c in found.traffic()[("data",), "all-reduce"])
    assert gradients == pytest.approx(found.parameter_bytes, rel=0.1)  # a half of most, the rest whole


# ---------------------------------------------------------------------------------------------------------------------
# Stages
# ---------------------------------------------------------------------------------------------------------------------


@functools.cache
def stage_costs(mesh: str, microbatches: int, batch_size: int = 64):
    recipe, layout, shape = setting(SLIM, mesh, microbatches)
    return explain.explain_stages(recipe, layout, shape, batch_size)


def test_each_stage_of_pipe_holds_only_its_own():
    stages = stage_costs("pipe=2", 4)
    names = [{parameter.name for parameter in stage.parameters} for stage in stages]
    assert not names[0] & names[1]
    assert names[0] | names[1] == {parameter.name for parameter in cost("data=1").parameters}
    assert sum(stage.parameter_bytes for stage in stages) == 4 * SLIM_PARAMETERS
    assert max(stage.flops for stage in stages) <= 0.7 * cost("data=1", batch_size=64).flops
    assert sum(stage.network_flops for stage in stages) == cost("data=1", batch_size=64).network_flops
    for stage in stages:
        assert stage.flops == pytest.approx(stage.network_flops, rel=0.1)


def test_stages_send_activations_one_way_and_gradients_the_other():
    first, second = stage_costs("pipe=2", 4)
    (forth,), (back,) = first.collectives, second.collectives
    assert (forth.axes, forth.times, forth.source) == (("pipe",), 4, "activations to stage 1")
    assert (back.axes, back.times, back.source) == (("pipe",), 4, "gradients to stage 0")
    assert forth.payload == back.payload == 4 * math.prod(forth.shapes[0])
    assert forth.shapes[0][0] == 64 // 4


@pytest.mark.parametrize(("mesh", "microbatches"), [("pipe=2", 4), ("pipe=3,data=2", 2)])
@pytest.mark.slow
def test_the_memory_of_a_stage_is_what_lives_on_its_device_when_the_backward_pass_begins(mesh, microbatches):
    recipe, layout, shape = setting(SLIM, mesh, microbatches)
    pipe, digits = pipeline.Pipeline(recipe, layout, shape), load_digits(shape).train
    state, live = pipe.init(), {}
    batch = gather(digits, next(iter(batches(np.arange(len(digits)), 64))), layout)

    def bytes_on(device):
        parts = [part.data for array in jax.live_arrays() for part in array.addressable_shards if part.device == device]
        return sum({part.unsafe_buffer_pointer(): part.nbytes for part in parts}.values())  # views share their memory

    for number, stage in enumerate(pipe.stages):

        def watched(*arguments, number=number, stage=stage, backward=stage.run_backward):
            if number not in live:
                jax.block_until_ready(arguments)
                gc.collect()
                live[number] = bytes_on(stage.layout.mesh.devices.flat[0])
            return backward(*arguments)

        stage.run_backward = watched
    gc.collect()
    before = [bytes_on(stage.layout.mesh.devices.flat[0]) for stage in pipe.stages]
    own = [
        stage.state + (stage.batch if not number else 0) for number, stage in enumerate(stage_costs(mesh, microbatches))
    ]
    pipe.train(state, batch)
    for number, found in enumerate(stage_costs(mesh, microbatches)):
        others = before[number] - own[number]  # arrays of other tests
        assert found.total - found.scratch == pytest.approx(live[number] - others, rel=0.1)


def test_the_report_of_stages():
    text = explain.stages_report(stage_costs("pipe=2", 4))
    assert "Stage 0: layers 0 to" in text and "Stage 1: layers" in text
    assert "4 micro-batches through 2 stages take 5 turns of the slowest stage" in text
    assert "it is idle for 20% of them" in text and "--microbatches" not in text


# ---------------------------------------------------------------------------------------------------------------------
# Reading HLO
# ---------------------------------------------------------------------------------------------------------------------

AXES = {"data": 2, "model": 4}
DATA = "replica_groups={{0,4},{1,5},{2,6},{3,7}}"
MODEL = "replica_groups=[2,4]<=[8]"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (f"%a = f32[8,4]{{1,0}} all-reduce(%x), channel_id=1, {DATA}, to_apply=%add",
         Collective("all-reduce", ("data",), 2, 128, ((8, 4),))),
        (f"ROOT %a = (f32[8]{{0:T(128)}}, bf16[3,3]{{1,0}}, /*index=2*/f32[]) all-reduce(%x, %y, %z), {MODEL}",
         Collective("all-reduce", ("model",), 4, 54, ((8,), (3, 3), ()))),
        (f"%a = (f32[8], f32[2]) all-reduce-start(f32[8] %x, f32[2] %y), {DATA}",
         Collective("all-reduce", ("data",), 2, 40, ((8,), (2,)))),
        ("%a = s8[5] all-reduce(%x), replica_groups={}, to_apply=%add",
         Collective("all-reduce", ("data", "model"), 8, 5, ((5,),))),
        ("%a = pred[6]{0} all-reduce(%x), replica_groups=mesh['data'=2,'model'=4] {'data','model'}, to_apply=%or",
         Collective("all-reduce", ("data", "model"), 8, 6, ((6,),))),
        ("%g = f64[2,16]{0,1} all-gather(%x), replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}",
         Collective("all-gather", ("data",), 2, 256, ((2, 16),))),
        ("%g = (f32[4,4]{1,0}, f32[16,4]{1,0:S(1)}) all-gather-start(%x), replica_groups={{0,1,2,3},{4,5,6,7}}",
         Collective("all-gather", ("model",), 4, 256, ((16, 4),))),
        (f"%g = ((f32[4], s32[2]), (f32[16], s32[8])) all-gather-start(%x, %y), {MODEL}, dimensions={{0}}",
         Collective("all-gather", ("model",), 4, 96, ((16,), (8,)))),
        (f"%r = bf16[2,3]{{1,0}} reduce-scatter(%x), {MODEL}, dimensions={{0}}, to_apply=%add",
         Collective("reduce-scatter", ("model",), 4, 48, ((2, 3),))),
        (f"%r = ((f32[8]), f32[2]) reduce-scatter-start(%x), {MODEL}, to_apply=%add",
         Collective("reduce-scatter", ("model",), 4, 32, ((2,),))),
        ("%p = f32[128,1,15,32]{3,2,1,0} collective-permute(%x), source_target_pairs={{0,1},{1,2},{4,5},{5,6}}",
         Collective("collective-permute", ("model",), 2, 245760, ((128, 1, 15, 32),))),
        ("%p = (f32[9], f32[9], u32[], u32[]) collective-permute-start(%x), source_target_pairs={{0,4},{1,1}}",
         Collective("collective-permute", ("data",), 2, 36, ((9,),))),
        (f"%t = u8[4,2]{{1,0}} all-to-all(%x), {MODEL}, dimensions={{0}}",
         Collective("all-to-all", ("model",), 4, 8, ((4, 2),))),
        (f"%t = (u16[4], u16[4]) all-to-all(%x, %y), {DATA}",
         Collective("all-to-all", ("data",), 2, 16, ((4,), (4,)))),
        ("%t = f32[<=8] ragged-all-to-all(%x), replica_groups={{0,1,2,3},{4,5,6,7}}",
         Collective("all-to-all", ("model",), 4, 32, ((8,),))),
        (f"%b = f8e4m3fn[7] collective-broadcast(%x), {DATA}",
         Collective("collective-broadcast", ("data",), 2, 7, ((7,),))),
    ],
)  # fmt: skip
def test_every_form_of_collective_is_read(line, expected):
    assert collectives(line, AXES) == [expected]


@pytest.mark.parametrize(
    "line",
    [
        "%d = f32[8] all-reduce-done(%a)",
        "%a = f32[8] all-reduce(%x), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}",  # nothing moves
        "%p = f32[8] collective-permute(%x), source_target_pairs={{0,0},{1,1}}",
        '%f = f32[8] fusion(%all-reduce.1), metadata={op_name="all-reduce(x)"}',
    ],
)
def test_what_moves_nothing_is_no_collective(line):
    assert collectives(line, AXES) == []


def test_unknown_groups_are_an_error_rather_than_nothing():
    with pytest.raises(ValueError, match="cannot read the devices of this collective"):
        collectives("%a = f32[8] all-reduce(%x), replica_groups=new_form<8>", AXES)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{0,1},{2,3}}", [(0, 1), (2, 3)]),
        ("{}", [(0, 1, 2, 3)]),
        ("[2,2]<=[4]", [(0, 1), (2, 3)]),
        ("[2,2]<=[2,2]T(1,0)", [(0, 2), (1, 3)]),
        ("[3,2]<=[2,3]T(1,0)", [(0, 3), (1, 4), (2, 5)]),
        ("[4,2]<=[2,2,2]T(2,1,0)", [(0, 4), (2, 6), (1, 5), (3, 7)]),
        ("mesh['a'=2,'b'=3] {'a'}", [(0, 3), (1, 4), (2, 5)]),
        ("mesh['a'=2,'b'=3] {'b'}", [(0, 1, 2), (3, 4, 5)]),
        ("mesh['a'=2,'b'=2,'c'=2] {'a','c'}", [(0, 1, 4, 5), (2, 3, 6, 7)]),
        ("mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}", [(0, 1), (2, 3)]),
        ("mesh['a'=2,'b'=2], device_ids=(0,3,1,2) {'b'}", [(0, 3), (1, 2)]),
        ("mesh['a'=4] {'a':(1)2}", [(0, 2), (1, 3)]),
        ("mesh['a'=4] {'a':(2)2}", [(0, 1), (2, 3)]),
    ],
)
def test_every_form_of_replica_groups_is_read(text, expected):
    line = f"%a = f32[] all-reduce(%x), replica_groups={text}, use_global_device_ids=true"
    assert device_groups(hlo._attribute(hlo._GROUPS, line), 4) == expected


def test_collectives_in_loops_and_branches_count_as_often_as_they_run():
    reduced = "replica_groups={{0,1}}, to_apply=%add"
    text = f"""HloModule jit_step, entry_computation_layout={{(f32[4]{{0}})->f32[4]{{0}}}}

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
}}

%inner (p: f32[4]) -> f32[4] {{
  ROOT %r = f32[4]{{0}} all-reduce(%p), {reduced}
}}

%body.1 (p: (s32[], f32[4])) -> (s32[], f32[4]) {{
  %r = f32[8]{{0}} all-reduce(%p), {reduced}
  %w = f32[4] while(%p), condition=%c, body=%inner, backend_config={{"known_trip_count":{{"n":"3"}}}}
}}

ENTRY %main (x: f32[4]) -> f32[4] {{
  %w = (s32[], f32[4]) while(%x), condition=%c, body=%body.1, backend_config={{"known_trip_count":{{"n":"5"}}}}
  %b = f32[4] conditional(%x), branch_computations={{%inner, %inner}}
  ROOT %r = f32[2]{{0}} all-reduce(%x), {reduced}
}}
"""
    found = [(c.payload, c.times) for c in collectives(text, {"data": 2})]
    assert sorted(found) == [(8, 1), (16, 1), (16, 1), (16, 15), (32, 5)]


def test_bytes_sent_and_seconds_by_hand():
    sent = {kind: Collective(kind, ("data",), 4, 1000, ()).sent for kind in explain.KINDS}
    assert sent["all-reduce"] == 1500  # two rounds of three quarters
    assert sent["all-gather"] == sent["reduce-scatter"] == sent["all-to-all"] == 750
    assert sent["collective-permute"] == sent["collective-broadcast"] == 1000
    slow = Machine(bytes_per_s=1000, latency_s=1)
    assert Collective("all-reduce", ("data",), 4, 1000, ()).seconds(slow) == 4  # doubling: 2 messages of 1000 bytes
    assert Collective("all-reduce", ("data",), 4, 100_000, ()).seconds(slow) == 156  # ring: 6 messages, 150,000 bytes
    assert Collective("collective-permute", ("data",), 2, 2000, ()).seconds(slow) == 3


# ---------------------------------------------------------------------------------------------------------------------
# In words
# ---------------------------------------------------------------------------------------------------------------------


def made_up(**changes) -> Explanation:
    """100 bytes of parameters, as much of optimiser state, and 6 more for each of 100 images."""
    values = dict(
        axis_sizes={"data": 2}, batch_size=100, rows=100, microbatches=1, rules=((".*", "whole"),),
        parameters=(Parameter("w", (25,), "whole", 100),), optimizer_state=100, other_state=0, batch=100,
        temporaries=600, compiled=900, gathered=100, whole_state=200, flops=4e6, network_flops=2e6, collectives=(),
    )  # fmt: skip
    return Explanation(**values | changes)


def test_advice_when_all_fits():
    text = "\n".join(explain.advice(made_up(), Machine(memory=3300)))
    assert "300 B on each device, state and gradients, do not depend" in text
    assert "600 B (67%) do, 6 B for each image" in text
    assert "activations run out first, at about 500 images a step; data splits them" in text
    assert "data=4 or --microbatches 2, each up to about 1,000 images" in text
    assert "fsdp" not in text


def test_advice_when_the_batch_does_not_fit():
    text = "\n".join(explain.advice(made_up(), Machine(memory=500)))
    assert "at about 33 images" in text
    assert "takes 900 B, which does not fit. Try data=8 or --microbatches 4" in text


def test_advice_when_the_state_does_not_fit():
    text = "\n".join(explain.advice(made_up(), Machine(memory=200)))
    assert "the state runs out first" in text and "fsdp=2 or model=2: about 150 B" in text


def test_advice_when_the_state_is_the_larger_part():
    text = "\n".join(explain.advice(made_up(optimizer_state=800), Machine(memory=1e4)))
    assert "parameters and optimiser state take 900 B" in text and "fsdp=4 leaves 225 B" in text


def test_the_report_names_its_assumptions_and_its_numbers():
    reduced = Collective("all-reduce", ("data",), 2, 50_000_000, ((5, 5),), source="jit(step)/transpose(jvp(w))/mul")
    machine = Machine(flops_per_s=2e9, bytes_per_s=50e9, latency_s=0)
    text = explain.report(made_up(collectives=(reduced,)), machine)
    assert "assumed: 2e+09 flops/s, 50 GB/s" in text
    assert "computing 2.000 ms, collectives 1.000 ms: between 2.000 ms (overlapped) and 3.000 ms" in text
    assert "4e+06 flops a step in the compiled program, 2 times the 2e+06" in text
    assert "all-reduce of 50 MB, 1 array: transpose(jvp(w))/mul" in text
    row = next(line.split() for line in text.splitlines() if line.startswith("  data "))
    assert row == ["data", "all-reduce", "1", "50", "MB", "50", "MB", "1.000"]


# ---------------------------------------------------------------------------------------------------------------------
# The command
# ---------------------------------------------------------------------------------------------------------------------


def test_the_explained_batch_is_the_one_that_is_fed():
    digits, layout = load_digits((32, 32, 3)).train, Layout(partition.make_mesh("data=4")[0], microbatches=2)
    fed = gather(digits, next(iter(batches(np.arange(len(digits)), 18))), layout)
    abstract = abstract_batch(Objective(), layout, 18, digits.image_shape)
    assert {k: (v.shape, v.dtype) for k, v in fed.items()} == {k: (v.shape, v.dtype) for k, v in abstract.items()}


def test_the_command_explains_and_leaves_nothing_behind(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    before = len(jax.live_arrays())
    assert call(*SMALL, "--mesh", "data=2", "--explain") == 0
    text = capsys.readouterr().out
    assert "--explain: mesh data=2 (2 devices), batch of 512 images. Compiled, not run." in text
    assert "Collectives\n  axis  kind        a step" in text
    assert len(jax.live_arrays()) == before and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--mesh data=4 --devices 8 --explain", "--devices is 8, but --mesh data=4 has 4 devices; they must be equal"),
        ("--mesh data=-1,model=3 --devices 8 --explain", "--devices is 8, but --mesh data=-1,model=3 has 6 devices"),
        ("--mesh data=4 --devices 4", "--devices is 4; allowed: only together with --explain"),
        ("--mesh data=4 --devices 0 --explain", "--devices is 0; allowed: 1 or more"),
    ],
)
def test_a_wrong_number_of_devices_is_one_line(flags, message, capsys):
    assert call(*SMALL, *flags.split()) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1 and message in shown.err


def test_the_command_explains_stages(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert call(*SMALL, "--mesh", "pipe=2", "--microbatches", "2", "--explain") == 0
    assert "--explain: mesh pipe=2 (2 devices), batch of 512 images in 2 micro-batches." in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_mesh_of_512_devices_is_explained_on_any_machine(tmp_path):
    flags = "--data digits --mesh data=-1 --devices 512 --batch-size 1024 --explain"
    done = run(*flags.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "--explain: mesh data=512 (512 devices), batch of 1,024 images. Compiled, not run." in done.stdout
    row = next(line.split() for line in done.stdout.splitlines() if line.startswith("  data  all-reduce"))
    assert float(row[3]) == pytest.approx(4 * SLIM_PARAMETERS / 1000, rel=0.05) and row[4] == "kB"
    assert list(tmp_path.iterdir()) == []
