"""Which groups of neurons, channels and heads may be cut, and why others may not."""

from __future__ import annotations

import copy
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
import torchvision.models as tv
from torch import Tensor

from lightning_sdp import Group, MaskPlan, Member, discover_components, register_neurons
from lightning_sdp.components import registry
from lightning_sdp.components.calls import Call, recorded_calls
from lightning_sdp.components.discovery import Discovery, discover
from lightning_sdp.components.members import produces, reads
from lightning_sdp.subnetwork import Subnetwork
from tests.unit.models import LlamaMLP, mlp

DIM, HEADS, HEAD_DIM = 16, 4, 4


@pytest.fixture(autouse=True)
def _own_rules() -> Iterator[None]:
    rules, threads = dict(registry._NEURON_RULES), torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    registry._NEURON_RULES.clear()
    registry._NEURON_RULES.update(rules)


def neurons(module: nn.Module, **options: Any) -> Discovery:
    return discover(module, "neuron", **options)


def names(found: Discovery) -> list[str]:
    return [component.name for component in found.maskable]


class Branch(nn.Module):
    """A residual block around a branch with the norm that it reads."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.norm, self.branch = nn.LayerNorm(DIM), branch

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(self.norm(x))


class Model(nn.Module):
    """A stem, residual blocks, a head, and a sample input."""

    def __init__(self, branch: Callable[[], nn.Module] = lambda: mlp(DIM), depth: int = 2, sample: bool = True) -> None:
        super().__init__()
        self.stem = nn.Linear(5, DIM)
        self.blocks = nn.ModuleList(Branch(branch()) for _ in range(depth))
        self.head = nn.Linear(DIM, 3)
        if sample:
            self.example_input_array = torch.zeros(2, 3, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Attention(nn.Module):
    """Attention by hand; how it finds out about its heads is up to those that derive from it."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM) for _ in range(4))

    def sizes(self) -> tuple[int, int]:
        return HEADS, HEAD_DIM

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (layer(x).view(batch, length, *self.sizes()).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v)
        return self.o(y.transpose(1, 2).reshape(batch, length, -1))


class CountedAttention(Attention):
    def sizes(self) -> tuple[int, int]:
        return self.n_heads, self.head_dim


class WidthAttention(Attention):
    """Has the heads in a literal, and reads the width of one."""

    def sizes(self) -> tuple[int, int]:
        return HEADS, self.head_dim


class ConfiguredAttention(Attention):
    def sizes(self) -> tuple[int, int]:
        return self.config.n_heads, HEAD_DIM


# Where groups may lie


def test_neurons_within_residual_blocks_are_found() -> None:
    found = neurons(Model())
    assert names(found) == ["blocks.0.branch.hidden", "blocks.1.branch.hidden"]
    assert [(group.kind, group.units, group.owner) for group in found.groups] == [
        ("neurons", 2 * DIM, f"blocks.{i}.branch") for i in range(2)
    ]
    assert [component.name for component in discover_components(Model(), "neuron")] == names(found)


class _Outside(Model):
    def __init__(self) -> None:
        super().__init__()
        self.before = mlp(DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_neurons_outside_of_the_blocks_are_cut_only_where_named() -> None:
    found = neurons(_Outside())
    assert names(found) == ["blocks.0.branch.hidden", "blocks.1.branch.hidden"]
    assert found.reasons["before.hidden"] == "it lies outside of the residual blocks"
    assert names(neurons(_Outside(), components="before")) == ["before.hidden"]
    plan = MaskPlan.build(_Outside(), num_subnetworks=2, granularity="neuron")
    assert "before.hidden: held by every worker: it lies outside of the residual blocks" in plan.explain()


@pytest.mark.parametrize(
    ("globs", "expected"),
    [
        ("blocks.0", ["0"]),
        (["blocks.2", "blocks.0.branch"], ["0", "2"]),
        ("**.branch", ["0", "1", "2"]),
    ],
)
def test_components_globs(globs: str | list[str], expected: list[str]) -> None:
    assert names(neurons(Model(depth=3), components=globs)) == [f"blocks.{i}.branch.hidden" for i in expected]


@pytest.mark.parametrize(
    ("globs", "reason"),
    [
        ("stem", "hidden: mixed by layer_norm"),  # what the stem produces is the residual stream
        ("blocks.0.norm", "hidden: mixed by layer_norm"),
        (["blocks.0", "head"], "hidden: mixed by layer_norm"),
        ("blocks.0.branch.0", r"blocks\.0\.branch\.hidden reaches beyond it"),
    ],
)
def test_glob_with_nothing_to_cut_is_refused_with_the_reason(globs: str | list[str], reason: str) -> None:
    odd = globs if isinstance(globs, str) else globs[-1]
    message = f"components='{odd}': nothing in there can be cut into neurons, channels or heads. {reason}"
    with pytest.raises(ValueError, match=message):
        neurons(Model(), components=globs)


def test_keep_holds_every_group_that_it_touches() -> None:
    found = neurons(Model(depth=3), keep=["blocks.0.branch.2", "head"])
    assert names(found) == ["blocks.1.branch.hidden", "blocks.2.branch.hidden"]
    assert [(c.name, reason, place) for c, reason, place in found.kept] == [
        ("blocks.0.branch.hidden", "named by keep (blocks.0.branch.2)", 0)
    ]
    with pytest.raises(ValueError, match="keep and keep_ends leave nothing to mask: all 3 groups of neurons of Model"):
        neurons(Model(depth=3), keep="blocks")


@pytest.mark.parametrize(
    ("depth", "keep_ends", "left"),
    [(4, [1, 2], [1]), (6, "auto", [1, 2, 3, 4]), (3, "auto", [0, 1, 2])],
)
def test_blocks_at_the_ends_stay_whole(depth: int, keep_ends: Any, left: list[int]) -> None:
    found = neurons(Model(depth=depth), keep_ends=keep_ends)
    assert names(found) == [f"blocks.{i}.branch.hidden" for i in left]
    assert all("in a block at an end of the stack" in reason for _, reason, _ in found.kept)
    assert len(found.kept) == depth - len(left)


def post_norm() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def test_post_norm_layers_are_a_stack_too() -> None:
    found = neurons(post_norm(), keep_ends=[1, 0])
    assert names(found) == [f"layers.{i}.{what}" for i in (1, 2) for what in ("self_attn.heads", "hidden")]
    assert [component.name for component, *_ in found.kept] == ["layers.0.self_attn.heads", "layers.0.hidden"]


def test_model_without_any_stack() -> None:
    module = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 12), nn.ReLU(), nn.Linear(12, 3))
    found = neurons(module, example_inputs=torch.zeros(2, 6))
    assert names(found) == ["0.hidden"]  # the two meet in the middle layer, and this is the larger one
    assert found.reasons["2.hidden"] == ("it meets the larger group '0.hidden' in one tensor, and only one can be cut")
    assert names(neurons(module, example_inputs=torch.zeros(2, 6), components="[024]")) == ["0.hidden"]


def test_one_of_two_groups_of_a_bottleneck_is_cut() -> None:
    with torch.device("meta"):
        resnet = tv.ResNet(tv.resnet.Bottleneck, [1, 1, 1, 1], 5)
    found = neurons(resnet)
    assert names(found) == [f"layer{i}.0.conv2.channels" for i in range(1, 5)]
    assert "meets the larger group 'layer1.0.conv2.channels'" in found.reasons["layer1.0.conv1.channels"]
    assert names(neurons(resnet, keep="layer1"))[0] == "layer2.0.conv2.channels"


# What is known without a sample input, and what the user says


def test_without_a_sample_input_the_message_says_what_is_missing() -> None:
    message = (
        r"No maskable group of neurons, channels or heads was found in Model\. Give the model an "
        r"`example_input_array`, .* `lightning_sdp\.register_neurons`"
    )
    with pytest.raises(ValueError, match=message):
        neurons(Model(sample=False))
    assert names(neurons(Model(sample=False), example_inputs=torch.zeros(1, 2, 5)))
    assert names(neurons(Model(lambda: LlamaMLP(DIM), sample=False))) == [f"blocks.{i}.branch.hidden" for i in (0, 1)]


class _Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 24), nn.Linear(24, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)))


def test_rule_of_the_user_goes_before_what_is_traced() -> None:
    assert names(neurons(Model(_Pairs))) == ["blocks.0.branch.hidden", "blocks.1.branch.hidden"]

    @register_neurons(_Pairs)
    def pairs(module: _Pairs) -> list[Group]:
        members = produces(module, "up", (12, 2)) + reads(module, "down", (12, 2))
        return [Group("pairs", "neurons", 12, tuple(members))]

    for sample in (True, False):
        found = neurons(Model(_Pairs, sample=sample))
        assert [(g.name, g.units) for g in found.groups] == [(f"blocks.{i}.branch.pairs", 12) for i in (0, 1)]


class _SharedKeyValue(nn.Module):
    """Queries of four heads, and one key and value for all of them, in one projection."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = 4, nn.Linear(12, 18), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split([3 * self.heads, 3, 3], dim=-1)
        q = q.unflatten(-1, (self.heads, 3)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k[:, None].expand_as(q), v[:, None].expand_as(q))
        return x + self.out(y.transpose(1, 2).flatten(2))


def test_a_rule_that_leaves_entries_of_a_tensor_without_a_unit_is_refused() -> None:
    @register_neurons(_SharedKeyValue)
    def rule(_: nn.Module) -> list[Group]:
        members = (Member("qkv.weight", 0, (4, 3)), Member("qkv.bias", 0, (4, 3)), Member("out.weight", 1, (4, 3)))
        return [Group("heads", "heads", 4, members, "", ("heads",))]

    model = nn.Sequential(_SharedKeyValue(), _SharedKeyValue())
    with pytest.raises(ValueError, match=r"its units are only 12 of the 18 entries of 'qkv.weight' along dimension 0"):
        neurons(model, example_inputs=torch.zeros(2, 5, 12))


class _Activated(nn.Module):
    """A gated MLP whose activation is a plain function."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.act = act
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize("last", [0, 1])
def test_modules_that_differ_in_a_function_are_tried_apart(last: int) -> None:
    softmax = _Activated(lambda x: x.softmax(-1))
    model = nn.Sequential(*([_Activated(F.silu), softmax] if last else [softmax, _Activated(F.silu)]))
    found = neurons(model, example_inputs=torch.zeros(2, 6), keep_ends=0)
    assert {group.name.partition(".")[0] for group in found.groups} == {str(1 - last)}


class _NormedHidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(DIM, 24), nn.LayerNorm(24), nn.Linear(24, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.norm(self.up(x))))


@pytest.mark.parametrize("with_norm", [True, False])
def test_rule_over_a_normalized_dimension_is_refused(with_norm: bool) -> None:
    if with_norm:
        with pytest.raises(ValueError, match=r"blocks\.0\.branch\.hidden: mixed by layer_norm"):
            neurons(Model(_NormedHidden))

    @register_neurons(_NormedHidden)
    def hidden(module: _NormedHidden) -> list[Group]:
        members = produces(module, "up", (24,)) + reads(module, "down", (24,))
        norm = [Member(f"norm.{key}", 0, (24,)) for key in ("weight", "bias")] if with_norm else []
        return [Group("units", "neurons", 24, (*members, *norm))]

    with pytest.raises(ValueError, match=r"^The rule for _NormedHidden says that 'blocks\.0\.branch\.units'") as caught:
        neurons(Model(_NormedHidden), on_unsliceable="pad" if with_norm else "keep")
    message = str(caught.value)
    assert "blocks.0.branch.up.weight" in message and "blocks.0.branch.down.weight" in message
    assert ("LayerNorm normalizes over the dimension that would be cut" in message) == with_norm


def test_rule_that_forgets_a_layer_is_refused() -> None:
    class Gated(_Pairs):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(DIM, 24)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.gate(x) * self.up(x))

    @register_neurons(Gated)
    def hidden(module: _Pairs) -> list[Group]:
        return [Group("units", "neurons", 24, tuple(produces(module, "up", (24,)) + reads(module, "down", (24,))))]

    with pytest.raises(ValueError, match=r"The rule for Gated says .* but its forward cannot do with fewer neurons"):
        neurons(Model(Gated))


def test_real_batch_is_run_only_where_no_rule_vouches_for_the_class() -> None:
    runs: list[str] = []

    def record(module: nn.Module) -> Callable[[], dict[str, Call]]:
        def run() -> dict[str, Call]:
            runs.append(type(module).__name__)
            with recorded_calls(module) as calls:
                module(torch.randn(1, 2, 5))
            return calls

        return run

    class TwoInputs(LlamaMLP):
        def forward(self, x: Tensor, scale: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x) * scale

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = TwoInputs(DIM)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x, x.new_full((DIM,), 2.0))

    trusted = Model(lambda: tv.vision_transformer.MLPBlock(DIM, 20, 0.0), sample=False)
    assert len(names(neurons(trusted, record=record(trusted)))) == 2 and runs == []
    guessed = Model(Scaled, sample=False)
    with pytest.raises(ValueError, match="it is not known what it is called with"):
        neurons(guessed)
    assert names(neurons(guessed, record=record(guessed))) == [f"blocks.{i}.branch.inner.hidden" for i in (0, 1)]
    assert runs == ["Model"]


# Whether a module can be cut


@pytest.mark.parametrize("extra", [{}, {"num_heads": HEADS}, {"num_layers": 8, "groups": 4, "width": DIM}])
def test_attributes_that_a_forward_reads_are_found(extra: dict[str, int]) -> None:
    """The width of a head comes first among the candidates, and would fit by its shape alone."""
    found = neurons(Model(lambda: CountedAttention(head_dim=HEAD_DIM, **extra, n_heads=HEADS)))
    assert names(found) == [f"blocks.{i}.branch.heads" for i in (0, 1)]
    assert [group.attributes for group in found.groups] == [(f"blocks.{i}.branch.n_heads",) for i in (0, 1)]


@pytest.mark.parametrize(
    "branch",
    [
        lambda: Attention(heads=HEADS, num_heads=HEADS, n_heads=HEADS),  # that nothing reads
        lambda: WidthAttention(head_dim=HEAD_DIM),  # whose cut would give a tensor of a fitting shape
        lambda: ConfiguredAttention(config=SimpleNamespace(n_heads=HEADS)),
    ],
)
def test_module_that_its_attributes_do_not_rule_is_not_cut(branch: Callable[[], nn.Module]) -> None:
    module = Model(branch, depth=1)
    reason = "its forward (cannot do with fewer heads|computes something else with fewer heads)"
    with pytest.raises(ValueError, match=rf"No maskable group .* blocks\.0\.branch\.heads: {reason}"):
        neurons(module)
    with pytest.raises(ValueError, match=rf"^'blocks\.0\.branch\.heads' cannot be cut: {reason}.* Name it with keep"):
        neurons(module, on_unsliceable="error")
    padded = neurons(module, on_unsliceable="pad")
    assert padded.padded == {"blocks.0.branch.heads"} and padded.groups[0].attributes == ()
    assert all(m.branch.__dict__.get("n_heads", HEADS) == HEADS for m in module.blocks)


class _Mixed(nn.Module):
    """An attention that cannot be cut and an MLP that can."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = Attention(), mlp(DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.attn(x))


def test_what_cannot_be_cut_is_kept_padded_or_refused() -> None:
    kept = neurons(Model(_Mixed, depth=1))
    assert names(kept) == ["blocks.0.branch.mlp.hidden"] and not kept.padded
    assert "its forward cannot do with fewer heads (RuntimeError: shape" in kept.reasons["blocks.0.branch.attn.heads"]
    padded = neurons(Model(_Mixed, depth=1), on_unsliceable="pad")
    assert padded.padded == {"blocks.0.branch.attn.heads"}  # and not what can be cut
    plan = MaskPlan.build(Model(_Mixed, depth=1), num_subnetworks=2, granularity="neuron", on_unsliceable="pad")
    storages = {(e["kind"], e["storage"]) for e in json.loads(plan.to_json())["components"]}
    assert storages == {("heads", "padded"), ("neurons", "sliced")}
    assert MaskPlan.from_json(plan.to_json()).fit(Model(_Mixed, depth=1)).components == plan.components
    with pytest.raises(ValueError, match=r"'blocks\.0\.branch\.attn\.heads' cannot be cut"):
        neurons(Model(_Mixed, depth=1), on_unsliceable="error")
    assert names(neurons(Model(_Mixed, depth=1), on_unsliceable="error", keep="**.attn")) == names(kept)


def test_plan_of_sliced_chunks_does_not_fit_a_model_that_has_become_opaque() -> None:
    plan = MaskPlan.build(
        Model(lambda: CountedAttention(n_heads=4, head_dim=4)), num_subnetworks=2, granularity="neuron"
    )
    with pytest.raises(ValueError, match=r"'blocks\.0\.branch\.heads' cannot be cut"):
        plan.fit(Model(Attention))


def test_config_that_layers_share_is_not_edited() -> None:
    config = SimpleNamespace(n_heads=HEADS)

    def branch() -> nn.Module:
        return CountedAttention(n_heads=config.n_heads, head_dim=HEAD_DIM, config=config)

    module = Model(branch)
    plan = MaskPlan.build(module, num_subnetworks=2, granularity="neuron")
    Subnetwork(module, plan, 0).carve()
    assert [block.branch.n_heads for block in module.blocks] == [2, 2]
    assert vars(config) == {"n_heads": HEADS} and all(block.branch.config is config for block in module.blocks)
    assert [block.branch.head_dim for block in module.blocks] == [HEAD_DIM] * 2


# Forwards that cannot be exported, and what discovery leaves behind


class _DataDependent(Model):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 1 if x.sum() > 0 else x)


def test_reason_of_a_failed_export_is_in_the_message() -> None:
    message = r"_DataDependent: _DataDependent cannot be exported with the example inputs \(\w+: .*data-dependent"
    with pytest.raises(ValueError, match=message):
        neurons(_DataDependent())
    known = _DataDependent(lambda: LlamaMLP(DIM))
    assert names(neurons(known)) == [f"blocks.{i}.branch.hidden" for i in (0, 1)]  # by their children's names
    assert "cannot be exported" in neurons(known).reasons["_DataDependent"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_sample_input_takes_the_dtype_of_the_parameters(dtype: torch.dtype) -> None:
    module = Model(depth=1).to(dtype)
    assert module.example_input_array.dtype == torch.float32
    assert names(neurons(module)) == ["blocks.0.branch.hidden"]


@pytest.mark.parametrize("sample", [torch.zeros(2, 3, 5), (torch.zeros(2, 3, 5),), {"x": torch.zeros(2, 3, 5)}])
def test_sample_inputs_come_in_several_forms(sample: Any) -> None:
    assert len(names(neurons(Model(depth=1, sample=False), example_inputs=sample))) == 1


class _Noisy(nn.Module):
    """Draws from every stream, counts and remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.latest = (
            CountedAttention(n_heads=HEADS, head_dim=HEAD_DIM),
            nn.BatchNorm1d(DIM),
            None,
        )
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.latest = self.inner(x)
        noise = F.dropout(self.latest, 0.5, self.training) * (random.random() + float(np.random.rand()))
        return self.norm(noise.transpose(1, 2)).transpose(1, 2)


def test_discovery_leaves_no_trace() -> None:
    module = Model(_Noisy)
    module.blocks[1].eval()
    for seed in (torch.random.manual_seed, random.seed, np.random.seed):
        seed(12345)
    streams = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    modules, tensors = dict(module.named_modules()), dict([*module.named_parameters(), *module.named_buffers()])
    state, values = {n: dict(m.__dict__) for n, m in modules.items()}, copy.deepcopy(module.state_dict())
    assert names(neurons(module)) == [f"blocks.{i}.branch.inner.heads" for i in (0, 1)]
    assert torch.equal(torch.get_rng_state(), streams[0]) and random.getstate() == streams[1]
    assert np.random.get_state()[1].tolist() == streams[2]
    assert [m.training for m in modules.values()] == [not n.startswith("blocks.1") for n in modules]
    after = dict([*module.named_parameters(), *module.named_buffers()])
    assert list(after) == list(tensors) and all(after[name] is tensors[name] for name in tensors)
    assert all(torch.equal(value, values[name]) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())
    for name, m in module.named_modules():
        assert m is modules[name] and m.__dict__.keys() == state[name].keys()
        assert all(m.__dict__[key] is value for key, value in state[name].items())


def test_model_on_meta_stays_there() -> None:
    with torch.device("meta"):
        module = Model(_Mixed, depth=1)
    plan = MaskPlan.build(module, num_subnetworks=2, granularity="neuron", on_unsliceable="pad")
    assert len(plan.groups) == 2
    assert all(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()])
    assert plan == MaskPlan.build(Model(_Mixed, depth=1), num_subnetworks=2, granularity="neuron", on_unsliceable="pad")


@pytest.mark.slow
def test_seven_billion_parameters_are_planned_in_little_memory_and_time() -> None:
    """A model of classes that no rule knows: 27 GB of weights, none of which are made."""
    script = Path(__file__).with_name("plan_large_model.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(script.parents[2])}
    run = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    print({key: value for key, value in result.items() if key.endswith(("bytes", "seconds"))})
    assert result["parameters"] == 6_738_415_616 and result["on_meta"]
    assert result["groups"] == [f"stack.{i}.{what}" for i in range(1, 31) for what in ("mixer.heads", "gate.hidden")]
    assert result["attributes"] == ["stack.1.mixer.n_heads", "stack.1.mixer.n_kv_heads"]
    assert len(result["kept"]) == 4 and result["components"] == 60 * 8
    assert all(abs(share - 0.5) < 0.01 for share in result["coverage"]) and result["imbalance"] < 1.05
    assert result["peak_bytes"] < 2e9
    assert result["cpu_seconds"] < 60  # of wall time it is to be 30, on a machine that does nothing else
