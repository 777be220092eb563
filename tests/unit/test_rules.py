"""The units that known classes of modules consist of, and what rules may not say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn as nn
import torchvision.models as tv
from torch.nn.utils import parametrizations
from torchvision.models.convnext import CNBlock
from torchvision.models.mobilenetv2 import InvertedResidual
from torchvision.models.mobilenetv3 import InvertedResidual as InvertedResidualV3
from torchvision.models.mobilenetv3 import InvertedResidualConfig
from torchvision.models.resnet import BasicBlock, Bottleneck
from torchvision.models.swin_transformer import ShiftedWindowAttention, ShiftedWindowAttentionV2
from torchvision.ops.misc import MLP

from lightning_sdp.components import registry
from lightning_sdp.components.base import Group, Member
from lightning_sdp.components.members import chain, produces, reads, scales
from lightning_sdp.components.registry import register_neurons
from lightning_sdp.components.rules import is_trusted, rule_groups
from lightning_sdp.components.tracing import trace_groups
from tests.zoo import ZOO


@pytest.fixture(autouse=True)
def _own_rules() -> Iterator[None]:
    rules = dict(registry._NEURON_RULES)
    yield
    registry._NEURON_RULES.clear()
    registry._NEURON_RULES.update(rules)


def shown(model: nn.Module) -> dict[str, tuple[int, list[str], tuple[str, ...]]]:
    """The groups of a model: units, members as ``"name@dim layout/axis"`` (``<`` reads), attributes."""
    groups, _ = rule_groups(model)
    return {
        group.name: (
            group.units,
            [
                f"{m.name}@{m.dim} {'x'.join(map(str, m.layout))}/{m.axis}{' <' if m.reads else ''}"
                for m in group.members
            ],
            group.attributes,
        )
        for group in groups
    }


def meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


NORM = ("weight", "bias", "running_mean", "running_var")


def test_residual_blocks() -> None:
    assert shown(meta(lambda: BasicBlock(6, 8, downsample=nn.Conv2d(6, 8, 1)))) == {
        "channels": (8, ["conv1.weight@0 8/0", *(f"bn1.{k}@0 8/0" for k in NORM), "conv2.weight@1 8/0 <"], ())
    }
    assert shown(meta(lambda: Bottleneck(16, 4))) == {
        "conv1.channels": (4, ["conv1.weight@0 4/0", *(f"bn1.{k}@0 4/0" for k in NORM), "conv2.weight@1 4/0 <"], ()),
        "conv2.channels": (4, ["conv2.weight@0 4/0", *(f"bn2.{k}@0 4/0" for k in NORM), "conv3.weight@1 4/0 <"], ()),
    }
    wide = shown(meta(lambda: Bottleneck(32, 8, groups=4, base_width=64)))
    norms = [[f"bn{i}.{k}@0 4x8/0" for k in NORM] for i in (1, 2)]
    members = ["conv1.weight@0 4x8/0", *norms[0], "conv2.weight@0 4x8/0", *norms[1], "conv3.weight@1 4x8/0 <"]
    assert wide == {"channels": (4, members, ())}


def test_inverted_residuals() -> None:
    assert shown(InvertedResidual(6, 6, 1, 1)) == {}
    members = ["conv.0.0.weight@0 18/0", *(f"conv.0.1.{k}@0 18/0" for k in NORM)]
    members += ["conv.1.0.weight@0 18/0", *(f"conv.1.1.{k}@0 18/0" for k in NORM), "conv.2.weight@1 18/0 <"]
    assert shown(meta(lambda: InvertedResidual(6, 6, 1, 3))) == {"channels": (18, members, ())}
    config = InvertedResidualConfig(8, 3, 16, 8, True, "HS", 1, 1, 1.0)
    members = ["block.0.0.weight@0 16/0", *(f"block.0.1.{k}@0 16/0" for k in NORM)]
    members += ["block.1.0.weight@0 16/0", *(f"block.1.1.{k}@0 16/0" for k in NORM)]
    members += ["block.2.fc1.weight@1 16/0 <", "block.2.fc2.weight@0 16/0", "block.2.fc2.bias@0 16/0"]
    members += ["block.3.0.weight@1 16/0 <"]
    squeeze = ["block.2.fc1.weight@0 8/0", "block.2.fc1.bias@0 8/0", "block.2.fc2.weight@1 8/0 <"]
    assert shown(meta(lambda: InvertedResidualV3(config, nn.BatchNorm2d))) == {
        "channels": (16, members, ()),
        "block.2.channels": (8, squeeze, ()),
    }


def test_mlps() -> None:
    hidden = ["block.3.weight@0 24/0", "block.3.bias@0 24/0", "block.5.weight@1 24/0 <"]
    assert shown(CNBlock(6, 1.0, 0.0)) == {"hidden": (24, hidden, ())}
    assert shown(MLP(4, [6, 3], bias=False)) == {"hidden": (6, ["0.weight@0 6/0", "3.weight@1 6/0 <"], ())}
    assert list(shown(MLP(4, [6, 5, 3]))) == ["0.hidden", "3.hidden"]
    assert shown(MLP(4, [6, 3], norm_layer=nn.LayerNorm)) == {}
    assert shown(MLP(4, [6, 3], activation_layer=nn.Softmax)) == {}


def test_multihead_attention() -> None:
    packed = ["in_proj_weight@0 3x4x3/1", "in_proj_bias@0 3x4x3/1", "out_proj.weight@1 4x3/0 <"]
    assert shown(nn.MultiheadAttention(12, 4)) == {"heads": (4, packed, ("num_heads",))}
    split = [f"{k}_proj_weight@0 4x3/0" for k in "qkv"] + [f"bias_{k}@2 4x3/0" for k in "kv"] + [packed[2]]
    attn = nn.MultiheadAttention(12, 4, bias=False, kdim=5, add_bias_kv=True)
    assert shown(attn) == {"heads": (4, split, ("num_heads",))}
    assert rule_groups(nn.MultiheadAttention(12, 1)) == ([], {"heads": "it has one unit only"})
    encoder = shown(nn.TransformerEncoderLayer(12, 4, 10))
    assert encoder["hidden"] == (10, ["linear1.weight@0 10/0", "linear1.bias@0 10/0", "linear2.weight@1 10/0 <"], ())
    assert encoder["self_attn.heads"][1] == [f"self_attn.{name}" for name in packed]
    assert encoder["self_attn.heads"][2] == ("self_attn.num_heads",)
    assert list(shown(nn.TransformerDecoderLayer(12, 4, 10))) == ["hidden", "self_attn.heads", "multihead_attn.heads"]


def test_shifted_windows() -> None:
    fused = ["qkv.weight@0 3x4x3/1", "qkv.bias@0 3x4x3/1"]
    last = "proj.weight@1 4x3/0 <"
    first = ShiftedWindowAttention(12, [4, 4], [2, 2], 4)
    assert shown(first) == {"heads": (4, [*fused, "relative_position_bias_table@1 4/0", last], ("num_heads",))}
    second = ShiftedWindowAttentionV2(12, [4, 4], [2, 2], 4)
    scale = ["logit_scale@0 4/0", "cpb_mlp.2.weight@0 4/0"]
    assert shown(second) == {"heads": (4, [*fused, *scale, last], ("num_heads",))}


MODELS = {  # Groups by kind, over the whole model.
    "resnet18": {"channels": 8},
    "resnet50": {"channels": 32},
    "resnext50_32x4d": {"channels": 16},
    "mobilenet_v2": {"channels": 16},
    "mobilenet_v3_small": {"channels": 10 + 9},
    "efficientnet_b0": {"channels": 15 + 16},
    "swin_t": {"neurons": 12, "heads": 12},
    "swin_v2_t": {"neurons": 12, "heads": 12},
    "vit_b_16": {"neurons": 12, "heads": 12},
    "convnext_tiny": {"neurons": 18},
}


@pytest.mark.parametrize("name", MODELS)
def test_whole_models(name: str) -> None:
    device = "cpu" if name.startswith("swin") else "meta"  # Swin's constructor reads values.
    with torch.device(device):
        model = getattr(tv, name)()
    groups, reasons = rule_groups(model)
    kinds = [group.kind for group in groups]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == MODELS[name] and not reasons
    names = {n for n, _ in [*model.named_parameters(), *model.named_buffers()]}
    for group in groups:
        assert all(m.name in names and m.name.startswith(f"{group.owner}.") for m in group.members)
        assert group.name.startswith(f"{group.owner}.")
        assert all(is_trusted(model.get_submodule(group.owner)) for group in groups)


# Hugging Face.


def hf(name: str, **kwargs: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(vocab_size=11, **kwargs)
    return meta(lambda: getattr(transformers, f"{name}Model")(config))


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_llama_like(name: str) -> None:
    sizes = {"hidden_size": 18, "intermediate_size": 10, "num_hidden_layers": 1, "num_attention_heads": 6}
    model = hf(name, num_key_value_heads=2, head_dim=6, pad_token_id=0, **sizes)
    bias = ["bias"] if name == "Qwen2" else []
    parts = [("q", "2x3x6"), ("k", "2x6"), ("v", "2x6")]
    heads = [f"layers.0.self_attn.{x}_proj.{k}@0 {s}/0" for x, s in parts for k in ("weight", *bias)]
    mlp = [f"layers.0.mlp.{x}_proj.weight@0 10/0" for x in ("gate", "up")]
    assert shown(model) == {
        "layers.0.self_attn.heads": (2, [*heads, "layers.0.self_attn.o_proj.weight@1 2x3x6/0 <"], ()),
        "layers.0.mlp.hidden": (10, [*mlp, "layers.0.mlp.down_proj.weight@1 10/0 <"], ()),
    }
    assert all(is_trusted(model.get_submodule(f"layers.0.{part}")) for part in ("self_attn", "mlp"))
    single = shown(hf(name, num_key_value_heads=1, head_dim=6, pad_token_id=0, **sizes))["layers.0.self_attn.heads"]
    assert single[0] == 6 and {m.split(".")[3] for m in single[1]} == {"q_proj", "o_proj"}
    assert single[2] == ("layers.0.self_attn.num_key_value_groups",)


def test_gpt2() -> None:
    found = shown(hf("GPT2", n_embd=12, n_head=4, n_layer=1, n_inner=10, n_positions=8, add_cross_attention=True))
    attributes = ("h.0.attn.num_heads", "h.0.attn.split_size")
    fused = ["h.0.attn.c_attn.weight@1 3x4x3/1", "h.0.attn.c_attn.bias@0 3x4x3/1", "h.0.attn.c_proj.weight@0 4x3/0 <"]
    assert found["h.0.attn.heads"] == (4, fused, attributes)
    assert found["h.0.crossattention.heads"][1] == [
        "h.0.crossattention.q_attn.weight@1 4x3/0",
        "h.0.crossattention.q_attn.bias@0 4x3/0",
        "h.0.crossattention.c_attn.weight@1 2x4x3/1",
        "h.0.crossattention.c_attn.bias@0 2x4x3/1",
        "h.0.crossattention.c_proj.weight@0 4x3/0 <",
    ]
    mlp = ["h.0.mlp.c_fc.weight@1 10/0", "h.0.mlp.c_fc.bias@0 10/0", "h.0.mlp.c_proj.weight@0 10/0 <"]
    assert found["h.0.mlp.hidden"] == (10, mlp, ())


def test_bert() -> None:
    model = hf("Bert", hidden_size=12, num_attention_heads=4, num_hidden_layers=1, intermediate_size=10)
    groups = {group.owner: group for group in rule_groups(model)[0]}
    assert list(groups) == ["encoder.layer.0", "encoder.layer.0.attention"]
    found = shown(model)
    attn = "encoder.layer.0.attention."
    members = [f"{attn}self.{x}.{k}@0 4x3/0" for x in ("query", "key", "value") for k in ("weight", "bias")]
    attributes = (f"{attn}self.num_attention_heads", f"{attn}self.all_head_size")
    assert found[f"{attn}heads"] == (4, [*members, f"{attn}output.dense.weight@1 4x3/0 <"], attributes)
    assert found["encoder.layer.0.hidden"][0] == 10


def test_t5_has_one_group_of_heads_per_stack() -> None:
    sizes = {"d_model": 12, "d_kv": 3, "d_ff": 10, "num_layers": 2, "num_heads": 4}
    found = shown(hf("T5", feed_forward_proj="gated-gelu", **sizes))
    heads = {name: group for name, group in found.items() if name.endswith("heads")}
    assert list(heads) == [
        "encoder.SelfAttention.heads",
        "decoder.SelfAttention.heads",
        "decoder.EncDecAttention.heads",
    ]
    units, members, attributes = heads["decoder.SelfAttention.heads"]
    assert units == 4 and len(members) == 2 * 4 + 1
    assert "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight@1 4/0" in members
    path = "decoder.block.{}.layer.0.SelfAttention.{}"
    assert attributes == tuple(path.format(i, key) for i in (0, 1) for key in ("n_heads", "inner_dim"))
    assert len(heads["decoder.EncDecAttention.heads"][1]) == 2 * 4
    ff = "encoder.block.1.layer.1.DenseReluDense"
    assert found[f"{ff}.hidden"][1] == [
        f"{ff}.wi_0.weight@0 10/0",
        f"{ff}.wi_1.weight@0 10/0",
        f"{ff}.wo.weight@1 10/0 <",
    ]


# Unknown classes.


class Attention(nn.Module):
    def __init__(self, names: str, q: int = 12, k: int = 6, o: int = 12, **attributes: int) -> None:
        super().__init__()
        for name, width in zip(names.split(), (q, k, k), strict=False):
            setattr(self, name, nn.Linear(8, width, bias=False))
        setattr(self, names.split()[3], nn.Linear(o, 8, bias=False))
        self.__dict__.update(attributes)


@pytest.mark.parametrize(
    "names", ["q_proj k_proj v_proj o_proj", "q_proj k_proj v_proj out_proj", "wq wk wv wo", "to_q to_k to_v to_out"]
)
@pytest.mark.parametrize("sizes", [{"head_dim": 3}, {"n_heads": 4}, {"num_heads": 4}, {"heads": 4}])
def test_attention_by_the_names_of_its_children(names: str, sizes: dict[str, int]) -> None:
    module = Attention(names, n_kv_heads=2, inner_dim=12, unrelated=4, num_key_value_groups=2, **sizes)
    q, k, v, o = names.split()
    members = [f"{q}.weight@0 2x2x3/0", f"{k}.weight@0 2x3/0", f"{v}.weight@0 2x3/0", f"{o}.weight@1 2x2x3/0 <"]
    counts = [name for name in sizes if name != "head_dim"]
    units, found, attributes = shown(module)["heads"]
    assert (units, found, sorted(attributes)) == (2, members, sorted([*counts, "n_kv_heads", "inner_dim"]))
    assert not is_trusted(module)


def test_attention_that_is_not_understood() -> None:
    names = "wq wk wv wo"
    assert shown(Attention(names)) == {}  # The width of a head is unknown.
    assert shown(Attention(names, q=12, k=8, head_dim=4)) == {}  # Queries do not divide evenly among the keys.
    assert shown(Attention(names, o=6, head_dim=3)) == {}
    normed = Attention(names, head_dim=3)
    normed.q_norm = nn.LayerNorm(12)
    assert shown(normed) == {}
    normed.q_norm = nn.LayerNorm(3)  # One per head is no matter.
    assert shown(normed)["heads"][0] == 2


def test_gated_mlp_by_the_names_of_its_children() -> None:
    class Gated(nn.Module):
        def __init__(self, names: str, down: int = 6) -> None:
            super().__init__()
            gate, up, last = names.split()
            setattr(self, gate, nn.Linear(4, 6)), setattr(self, up, nn.Linear(4, 6))
            setattr(self, last, nn.Linear(down, 4))

    for names in ("gate_proj up_proj down_proj", "w1 w3 w2"):
        gate, up, down = names.split()
        members = [f"{x}.{k}@0 6/0" for x in (gate, up) for k in ("weight", "bias")] + [f"{down}.weight@1 6/0 <"]
        assert shown(Gated(names)) == {"hidden": (6, members, ())}
        assert shown(Gated(names, down=12)) == {}


# What the user registers.


class Plain(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 6, bias=bias), nn.BatchNorm1d(6), nn.Linear(6, 4)
        self.width, self.ratio = 12, 1.5


class Heir(Plain):
    def forward(self) -> None: ...


def plain_rule(module: Plain) -> list[Group]:
    members = produces(module, "up", (6,)) + scales(module, "norm", (6,)) + reads(module, "down", (6,))
    return [Group("hidden", "neurons", 6, tuple(members), "", ("width",))]


def test_registered_classes() -> None:
    assert rule_groups(Plain()) == ([], {})
    register_neurons(f"{Plain.__module__}.Plain")(plain_rule)
    model = nn.Sequential(Plain(), Heir())
    names = ["0.hidden", "1.hidden"]
    assert [group.name for group in rule_groups(model)[0]] == names
    assert rule_groups(model)[0][1].owner == "1" and rule_groups(model)[0][1].attributes == ("1.width",)
    assert is_trusted(model[0]) and not is_trusted(model[1])  # The heir has a forward of its own.

    @register_neurons(Heir)
    def none(module: Heir) -> list[Group]:
        return []

    assert [group.name for group in rule_groups(model)[0]] == names[:1]
    register_neurons(Plain)(none)  # The latest counts.
    assert rule_groups(model)[0] == []


def test_shipped_rules_can_be_replaced() -> None:
    register_neurons(nn.MultiheadAttention)(lambda attn: [])
    assert rule_groups(nn.MultiheadAttention(12, 4)) == ([], {})


def test_members_that_a_module_has_as_none_are_left_out() -> None:
    @register_neurons(Plain)
    def rule(module: Plain) -> list[Group]:
        names = [("up.weight", 0), ("up.bias", 0), ("norm.weight", 0)]
        return [Group("hidden", "neurons", 6, tuple(Member(name, dim, (6,)) for name, dim in names))]

    assert shown(Plain(bias=False))["hidden"][1] == ["up.weight@0 6/0", "norm.weight@0 6/0"]


def test_the_outer_module_goes_first() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.other = Plain(), Plain()

    register_neurons(Plain)(plain_rule)

    @register_neurons(Outer)
    def rule(module: Outer) -> list[Group]:
        members = produces(module, "inner.up", (2, 3)) + reads(module, "inner.down", (2, 3))
        return [Group("pairs", "channels", 2, tuple(members), "inner")]

    groups, reasons = rule_groups(nn.Sequential(Outer()))
    assert [(group.name, group.owner) for group in groups] == [("0.pairs", "0.inner"), ("0.other.hidden", "0.other")]
    assert reasons == {}


def bad(*members: Member, units: int = 6, kind: str = "neurons", attributes: tuple[str, ...] = ()) -> list[Group]:
    return [Group("hidden", kind, units, members, "", attributes)]


UP = Member("up.weight", 0, (6,))
BAD: list[tuple[list[Group], str]] = [
    (bad(Member("up.kernel", 0, (6,))), "there is no tensor `up.kernel`"),
    (bad(Member("upp.weight", 0, (6,))), "there is no tensor `upp.weight`"),
    (bad(Member("width", 0, (6,))), "`width` is no tensor"),
    (bad(Member("up.weight", 2, (6,))), r"`up.weight` of shape \(6, 4\) has no dimension 2"),
    (bad(Member("up.weight", 0, (6, 2))), r"layout \(6, 2\) of `up.weight` ends at 12 of 6 entries"),
    (bad(Member("up.weight", 0, (6,), start=1)), r"layout \(6,\) of `up.weight` ends at 7 of 6 entries"),
    (bad(Member("up.weight", 0, (6,), start=-1)), "ends at 5"),
    (bad(Member("up.weight", 0, (3, 2))), r"axis 0 of layout \(3, 2\) of `up.weight` is not 6 units"),
    (bad(Member("up.weight", 0, (6,), 1)), "axis 1 of layout"),
    (bad(UP, units=3), "`up.weight` is not 3 units"),
    (bad(UP, UP), "claims entries of `up.weight` along dimension 0 twice"),
    (bad(UP) + bad(Member("down.weight", 1, (6,))), "several groups of one name"),
    (bad(), "it has no members"),
    (bad(UP, kind="block"), "its kind is 'block'"),
    (bad(UP, attributes=("breadth",)), "there is no attribute `breadth`"),
    (bad(UP, attributes=("ratio",)), "the attribute `ratio` is 1.5, not a multiple of 6 units"),
    (bad(UP, attributes=("down.out_features",)), "the attribute `down.out_features` is 4"),
]


@pytest.mark.parametrize(("groups", "message"), BAD)
def test_rules_that_do_not_fit(groups: list[Group], message: str) -> None:
    register_neurons(Plain)(lambda module: groups)
    with pytest.raises(ValueError, match=rf"The rule for Plain, applied to `0`.*{message}"):
        rule_groups(nn.Sequential(Heir()))


def test_helpers_name_a_child_that_they_do_not_know() -> None:
    with pytest.raises(ValueError, match="`norm` is a BatchNorm1d, not a linear or convolutional layer"):
        produces(Plain(), "norm", (6,))
    assert produces(nn.Sequential(nn.ConvTranspose2d(3, 5, 1)), "0", (5,))[0].dim == 1
    assert reads(nn.Sequential(nn.ConvTranspose2d(3, 5, 1)), "0", (3,))[0].dim == 0
    mixing = nn.Sequential(nn.Conv2d(3, 6, 1), nn.Conv2d(6, 6, 1), nn.Conv2d(6, 3, 1))
    assert chain(mixing, "0", ["1"], "2", "channels", "channels") == []
    grouped = nn.Sequential(nn.Conv2d(4, 6, 1, groups=2), nn.Conv2d(6, 3, 1))
    assert chain(grouped, "0", [], "1", "channels", "channels") == []


# Tensors that a model has more than once.


def test_tied_tensors_are_left_whole() -> None:
    register_neurons(Plain)(plain_rule)
    model = nn.ModuleDict({"a": Plain(), "b": Plain(), "tail": nn.Linear(6, 4)})
    model["b"].down.weight = model["tail"].weight
    groups, reasons = rule_groups(model)
    assert [group.name for group in groups] == ["a.hidden"]
    assert reasons == {"b.hidden": "`b.down.weight` is also `tail.weight`"}

    model = nn.ModuleDict({"layer": nn.Linear(4, 6), "plain": Plain()})
    model["plain"].up = model["layer"]  # The layer itself is shared.
    assert rule_groups(model)[1] == {"plain.hidden": "`plain.up.weight` is also `layer.weight`"}

    inner = Plain()
    inner.copy = nn.Linear(4, 6)
    inner.copy.weight = inner.up.weight
    assert rule_groups(inner)[1] == {"hidden": "`up.weight` is also `copy.weight`"}


def test_a_shared_module_has_its_units_once() -> None:
    register_neurons(Plain)(plain_rule)
    shared = Plain()
    groups, reasons = rule_groups(nn.Sequential(shared, nn.ReLU(), shared))
    assert [group.name for group in groups] == ["0.hidden"] and reasons == {}


def test_layers_that_have_been_replaced() -> None:
    layer = nn.TransformerEncoderLayer(12, 4, 10)
    parametrizations.weight_norm(layer.linear1)
    groups, reasons = rule_groups(layer)
    assert [group.name for group in groups] == ["self_attn.heads"]
    assert reasons == {"hidden": "`linear1.weight` is not stored, but computed"}

    class Adapter(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base = base

    layer = nn.TransformerEncoderLayer(12, 4, 10)
    layer.linear2 = Adapter(layer.linear2)
    groups, reasons = rule_groups(nn.Sequential(layer))
    assert [group.name for group in groups] == ["0.self_attn.heads"]
    assert reasons == {"0": "`linear2` is a Adapter, not a linear or convolutional layer."}


# The same groups by another way.


def units_of(group: Group) -> frozenset[tuple[Any, ...]]:
    """What a group is, whatever it is called: which entries of which tensors belong to each unit."""
    entries: dict[tuple[str, int, int], list[int]] = {}
    for member in group.members:
        for unit in range(group.units):
            key = (member.name, member.dim, unit)
            runs = member.runs(unit, unit + 1)
            entries.setdefault(key, []).extend(i for start, stop in runs for i in range(start, stop))
    return frozenset((key, tuple(sorted(own))) for key, own in entries.items())


@pytest.mark.parametrize("name", list(ZOO))
def test_rules_and_tracing_find_the_same_groups(name: str) -> None:
    if name.startswith("hf_"):
        pytest.importorskip("transformers")
    with torch.device("meta"):
        module, inputs = ZOO[name]()
    by_rule, reasons = rule_groups(module)
    traced = {units_of(group): group for group in trace_groups(module, inputs).groups}
    assert not reasons
    missed = [group.name for group in by_rule if units_of(group) not in traced]
    assert missed == []
