"""The first rule that matches a linear decides, and a rule that does nothing is an error."""

from pathlib import Path

import pytest
import torch

from quantkit.errors import FormatError, QuantkitError, UsageError
from quantkit.packing.schemes import scheme
from quantkit.recipes.recipe import (
    MAX_CHARACTERS,
    Choice,
    Recipe,
    Rule,
    parse_group_size,
    parse_rule,
    read_recipe,
)
from quantkit.recipes.recipe_options import RecipeOptions

NAMES = [f"model.layers.{i}.{m}" for i in range(3) for m in ("self_attn.q_proj", "mlp.down_proj")]
LINEARS = dict.fromkeys([*NAMES, "lm_head"], torch.bfloat16)
KEPT = {"lm_head": "kept unless asked for"}
DENSE = {"model.norm": "a norm", "model.embed_tokens": "an embedding"}


def fates(recipe: Recipe) -> dict[str, str]:
    """`format group method` of each linear, or the reason it stays dense."""
    found = recipe.fates(LINEARS, KEPT, DENSE)
    return {
        name: fate.reason
        if fate.scheme is None or fate.method is None
        else f"{fate.scheme.format.name} {fate.scheme.group_size} {fate.method.name}"
        for name, fate in found.items()
    }


def rules(*texts: str) -> Recipe:
    return Recipe(rules=tuple(parse_rule(text, Choice()) for text in texts))


def write(tmp_path: Path, text: str, name: str = "recipe.toml") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_without_rules_everything_but_the_kept_gets_the_default():
    found = fates(Recipe())
    assert found.pop("lm_head") == "kept unless asked for"
    assert set(found) == set(NAMES) and set(found.values()) == {"int4 128 mse"}


def test_the_first_rule_that_matches_decides():
    found = fates(rules("model.layers.0.*=keep", "*.down_proj=int8", "*_proj=fp6:64:rtn"))
    assert found["model.layers.0.mlp.down_proj"] == "kept by rule 'model.layers.0.*'"
    assert found["model.layers.1.mlp.down_proj"] == "int8 None mse"
    assert found["model.layers.1.self_attn.q_proj"] == "fp6-e2m3 64 rtn"


def test_exact_names_and_character_classes_are_patterns():
    found = fates(rules("model.layers.1.mlp.down_proj=int8", "model.layers.[02].mlp.down_proj=fp6"))
    assert [found[name].split()[0] for name in NAMES[1::2]] == ["fp6-e2m3", "int8", "fp6-e2m3"]


def test_patterns_are_case_sensitive_and_match_whole_names():
    for pattern in ("Model.*", "layers.0.*", "*.q_pro"):
        with pytest.raises(UsageError, match="matches no linear"):
            fates(rules(f"{pattern}=int8"))


def test_a_rule_quantizes_what_is_otherwise_kept():
    assert fates(rules("lm_head=int8"))["lm_head"] == "int8 None mse"


def test_fates_say_which_rule_decided():
    found = rules("*.q_proj=int8").fates(LINEARS, KEPT, DENSE)
    assert found[NAMES[0]].reason == "rule '*.q_proj'"
    assert found[NAMES[1]].reason == "default"


def test_a_default_can_keep_all_but_what_rules_name(tmp_path):
    path = write(tmp_path, '[default]\nkeep = true\n[[rule]]\nmatch = "*.q_proj"\nformat = "int4"\n')
    found = fates(read_recipe(path, Choice()))
    assert found["model.layers.0.self_attn.q_proj"] == "int4 128 mse"
    assert found["model.layers.0.mlp.down_proj"] == "kept by default"


def test_scales_follow_the_dtype_of_the_weight():
    found = Recipe().fates({"a": torch.float16, "b": torch.float32}, {}, {})
    assert found["a"].scheme is not None and found["a"].scheme.scale_dtype is torch.float16
    assert found["b"].scheme is not None and found["b"].scheme.scale_dtype is torch.bfloat16


def test_a_pattern_that_matches_nothing_shows_what_names_look_like():
    with pytest.raises(UsageError, match=r"rule 'blocks\.\*' matches no linear .* 'model.layers.0.self_attn"):
        fates(rules("blocks.*=int8"))


def test_a_pattern_that_matches_only_dense_modules_shows_why_they_are_dense():
    with pytest.raises(
        UsageError, match=r"rule '\*norm' matches no linear; 'model.norm' stays dense: a norm"
    ):
        fates(rules("*norm=int8"))


@pytest.mark.parametrize("pattern", ["*.q_proj", "model.layers.1.self_attn.q_proj"])
def test_a_rule_behind_one_that_takes_all_it_matches_is_an_error(pattern):
    with pytest.raises(UsageError, match="never applies: earlier rules match all it matches"):
        fates(rules("*.q_proj=int8", f"{pattern}=keep"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a=keep", Choice(keep=True)),
        ("a=int8", Choice("int8", None, "integer", None, "rtn")),
        ("a=int8:64", Choice("int8", 64, "integer", None, "rtn")),
        ("a=int4:channel", Choice("int4", "channel", "integer", None, "rtn")),
        ("a=fp8:tensor", Choice("fp8", "tensor", "none", None, "rtn")),
        ("a=int4", Choice("int4", 32, "integer", None, "rtn")),
        ("a=fp6::mse", Choice("fp6", None, "none", None, "mse")),
        ("a=fp4-e2m1:32", Choice("fp4-e2m1", 32, "none", None, "rtn")),
        ("a=int4:16:mse", Choice("int4", 16, "integer", None, "mse")),
    ],
)
def test_rules_on_the_command_line(text, expected):
    assert parse_rule(text, Choice("int4", 32, "integer", None, "rtn")) == Rule("a", expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("down_proj", "is not PATTERN=FORMAT"),
        ("=int8", "is not PATTERN=FORMAT"),
        ("a=", "is not PATTERN=FORMAT"),
        ("a=int4:32:mse:1", "has more than FORMAT:GROUP:METHOD"),
        ("a=int4:mse", "group size 'mse' is not a positive integer, 'channel' or 'tensor'"),
        ("a=int9", "unknown format 'int9'; known are int8"),
        ("a=int4:32:sqrt", "unknown method 'sqrt'; known are rtn, mse"),
        ("a=int4::", "unknown method ''"),
    ],
)
def test_rules_that_are_refused(text, message):
    with pytest.raises(QuantkitError, match=message):
        rules(text)


@pytest.mark.parametrize("text", ["0", "-5", "1.5", "\u0661", "9" * 5000, "1048577", "32 ", ""])
def test_group_sizes_that_are_refused(text):
    with pytest.raises(UsageError, match="is not a positive integer, 'channel' or 'tensor'"):
        parse_group_size(text)


def test_group_sizes_that_are_taken():
    assert [parse_group_size(text) for text in ("1", "128", "1048576", "channel", "tensor", None)] == [
        1,
        128,
        1 << 20,
        "channel",
        "tensor",
        None,
    ]


def test_a_recipe_file_inherits_from_its_default_and_that_from_the_command_line(tmp_path):
    path = write(
        tmp_path,
        """
        [default]
        group_size = 32

        [[rule]]
        match = "a"
        format = "int8"

        [[rule]]
        match = "b"
        format = "int4"
        method = "mse"

        [[rule]]
        match = "c"
        keep = true

        [[rule]]
        match = "d"
        group_size = "channel"
        zero_point = "none"

        [[rule]]
        match = "e"
        format = "fp6"
        """,
    )
    recipe = read_recipe(path, Choice(zero_point="integer", method="rtn"))
    assert recipe.default == Choice("int4", 32, "integer", None, "rtn")
    assert {rule.match: rule.choice for rule in recipe.rules} == {
        "a": Choice("int8", None, "integer", None, "rtn"),
        "b": Choice("int4", 32, "integer", None, "mse"),
        "c": Choice("int4", 32, "integer", None, "rtn", keep=True),
        "d": Choice("int4", "channel", "none", None, "rtn"),
        "e": Choice("fp6", None, "none", None, "rtn"),
    }


#: TOML and the error text.
REFUSED = [
    ("[options]", r"unknown keys \['options'\]; it has 'rotate', 'embeddings', 'kv_scales',"),
    ("default = 3", "'default' must be a table; found int"),
    ("rule = 'x'", r"'rule' must be an array of tables"),
    ("rule = ''", r"'rule' must be an array of tables"),
    ("[rule]\nmatch = 'a'", r"'rule' must be an array of tables"),
    ("rule = [1]", r"'rule' must be an array of tables"),
    ("[[rule]]\nformat = 'int4'", "a rule needs a 'match' pattern; found None"),
    ("[[rule]]\nmatch = ''", "a rule needs a 'match' pattern; found ''"),
    ("[[rule]]\nmatch = 3", "a rule needs a 'match' pattern; found 3"),
    ("[[rule]]\nmatch = 'a'\nbits = 4", r"unknown keys \['bits'\]; known are \['activations', 'format'"),
    ("[default]\nformat = 4", "'format' is 4; expected str"),
    ("[default]\nkeep = 'yes'", "'keep' is 'yes'; expected bool"),
    ("[default]\nzero_point = true", "'zero_point' is True; expected str"),
    ("[default]\npacking = 5", "'packing' is 5; expected str"),
    ("[default]\npacking = 'trits'", "unknown packing 'trits'; known are bits, radix"),
    ("[[rule]]\nmatch = 'a'\npacking = 'radix'", "packing 'radix' is not for 'int4'"),
    ("[default]\nzero_point = 'half'", "unknown zero-point 'half'; known are none, integer, float"),
    ("[default]\nscale_dtype = 8", "'scale_dtype' is 8; expected str"),
    ("[default]\nscale_dtype = 'e5m2'", "unknown scale dtype 'e5m2'; known are float32, float16"),
    ("[default]\ngroup_size = true", "'group_size' is True; expected int or str"),
    ("[default]\ngroup_size = 1.5", "'group_size' is 1.5; expected int or str"),
    ("[default]\ngroup_size = 'row'", "group size 'row' is not a positive"),
    ("[default]\ngroup_size = 'tensor'\nzero_point = 'float'", "does not go with float zero-points"),
    ("[default]\ngroup_size = 'tensor'\nmethod = 'hqq'", "has no way to choose one scale per tensor"),
    ("[default]\nformat = 'mxfp4'\ngroup_size = 'tensor'", "does not go with e8m0 scales"),
    ("[default]\nformat = 'binary-residual'\nmethod = 'hqq'", "has no way to choose several planes"),
    ("[default]\ngroup_size = 0", "group size 0 is out of range"),
    ("[default]\nformat = 'int9'", "unknown format 'int9'"),
    ("[default]\nmethod = 'sqrt'", "unknown method 'sqrt'"),
    ("[[rule]]\nmatch = 'a'\nformat = 'fp6'\nzero_point = 'float'", "has no zero-point"),
    (
        "[[rule]]\nmatch = 'a'\nformat = 'int8'\nmethod = 'rtn'\nkeep = true",
        r"rule 'a' keeps its linears dense, so \['format', 'method'\] would do nothing",
    ),
    (
        "[default]\nkeep = true\n[[rule]]\nmatch = 'a'\ngroup_size = 32",
        r"rule 'a' keeps its linears dense, so \['group_size'\] would do nothing; set 'keep' to false, or "
        "leave that out",
    ),
]


@pytest.mark.parametrize(("text", "message"), [("rule = [", "cannot be read: Invalid value"), *REFUSED])
def test_recipe_files_that_are_refused(tmp_path, text, message):
    path = write(tmp_path, text)
    with pytest.raises(UsageError, match=message) as refusal:
        read_recipe(path, Choice())
    assert str(path) in str(refusal.value)


TOML = """
[default]
format = "int4"
group_size = 32
zero_point = "none"

[[rule]]
match = "model.layers.0.*"
keep = true

[[rule]]
match = "*.[qk]_proj"
zero_point = "integer"
method = "rtn"

[[rule]]
match = "lm_head"
format = "ternary"
group_size = "channel"
packing = "radix"
scale_dtype = "float16"
"""


def test_toml_may_begin_with_a_byte_order_mark(tmp_path):
    assert read_recipe(write(tmp_path, "\ufeff" + TOML), Choice()) == read_recipe(
        write(tmp_path, TOML, "plain.toml"), Choice()
    )


def test_a_file_that_says_nothing_leaves_the_default(tmp_path):
    assert read_recipe(write(tmp_path, ""), Choice("int8")) == Recipe(Choice("int8"))


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("r.yaml", "ends in '.yaml'"),
        ("r.YML", "ends in '.YML'"),
        ("r.json", "ends in '.json'"),
        ("r.toml.txt", "ends in '.txt'"),
        ("r", "has no suffix"),
    ],
)
def test_a_recipe_that_is_not_toml_is_refused_with_the_form_to_write(tmp_path, name, found):
    path = write(tmp_path, "", name)
    with pytest.raises(UsageError) as refusal:
        read_recipe(path, Choice())
    assert str(refusal.value) == (
        f"recipe {path} {found}; expected TOML in a file that ends in '.toml': a line [[rule]], then lines "
        'such as match = "*.down_proj" and format = "int8".'
    )


def test_recipe_files_that_cannot_be_read(tmp_path):
    with pytest.raises(UsageError, match=r"cannot be read: .*No such file"):
        read_recipe(tmp_path / "none.toml", Choice())
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match=r"cannot be read: .*decode"):
        read_recipe(binary, Choice())
    (tmp_path / "directory.toml").mkdir()
    with pytest.raises(UsageError, match=r"cannot be read: .*not a regular file"):
        read_recipe(tmp_path / "directory.toml", Choice())
    longest = write(tmp_path, "#" * MAX_CHARACTERS, "long.toml")
    assert read_recipe(longest, Choice()) == Recipe()
    with longest.open("a") as file:
        file.write("#")
    with pytest.raises(
        UsageError, match=r"has more than the 1048576 characters .* Let patterns stand for names\."
    ):
        read_recipe(longest, Choice())


def test_options_come_before_the_rules_of_the_file(tmp_path):
    path = write(tmp_path, '[[rule]]\nmatch = "*"\nformat = "fp6"\n')
    found = fates(RecipeOptions(recipe=path, rules=("*.q_proj=int8",), lm_head="int8").to_recipe())
    assert found["model.layers.0.self_attn.q_proj"] == "int8 None mse"
    assert found["lm_head"] == "int8 None mse"
    assert found["model.layers.0.mlp.down_proj"] == "fp6-e2m3 128 mse"


def test_the_lm_head_flag_takes_the_method_and_not_the_grid_of_the_default():
    recipe = RecipeOptions(
        format="int4", group_size=32, zero_point="integer", method="rtn", lm_head="int8"
    ).to_recipe()
    assert fates(recipe)["lm_head"] == "int8 None rtn"
    assert fates(RecipeOptions(lm_head="keep").to_recipe())["lm_head"] == "kept by rule '*lm_head'"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "fp6"}, r"--format fp6 and \[default\] of recipe .* \(int8\) differ"),
        ({"group_size": 128}, r"--group-size 128 and .* \(64\) differ"),
        ({"method": "rtn"}, r"--method rtn and .* \(mse\) differ"),
        ({"zero_point": "integer"}, r"--zero-point integer and .* \(none\) differ"),
        ({"packing": "radix"}, r"--packing radix and .* \(bits\) differ"),
        ({"scale_dtype": "e4m3"}, r"--scale-dtype e4m3 and .* \(float32\) differ"),
    ],
)
def test_options_that_contradict_the_recipe_file_are_refused(tmp_path, options, message):
    path = write(
        tmp_path,
        "[default]\nformat='int8'\ngroup_size=64\nmethod='mse'\nzero_point='none'\nscale_dtype='float32'\n",
    )
    with pytest.raises(UsageError, match=message):
        RecipeOptions(recipe=path, **options).to_recipe()
    agreeing = RecipeOptions(recipe=path, format="int8", group_size=64, method="mse").to_recipe()
    assert agreeing.default == Choice("int8", 64, "none", "float32", "mse")


def test_another_format_keeps_the_kind_of_zero_point_it_can_have_and_its_own_scales(tmp_path):
    default = Choice("int4", 32, "float", "e4m3", "rtn")
    assert parse_rule("a=int2", default).choice == Choice("int2", None, "float", None, "rtn")
    assert parse_rule("a=nf4", default).choice == Choice("nf4", None, "none", None, "rtn")
    assert parse_rule("a=int4:64", default).choice == Choice("int4", 64, "float", "e4m3", "rtn")
    path = write(tmp_path, "[[rule]]\nmatch = 'a'\nformat = 'int3'\nscale_dtype = 'e4m3'\n")
    (rule,) = read_recipe(path, default).rules
    assert rule.choice == Choice("int3", None, "float", "e4m3", "rtn")


def test_a_preset_brings_its_scale_dtype_and_a_choice_may_change_it():
    assert Choice("nvfp4").scheme(torch.float16) == scheme("nvfp4")
    assert Choice("nvfp4", scale_dtype="float16").scheme(torch.bfloat16).scale_dtype is torch.float16


def test_another_format_keeps_the_packing_it_can_have():
    ternary = Choice("ternary", packing="radix")
    assert ternary.scheme(torch.bfloat16) == scheme("ternary", packing="radix")
    assert ternary.of_format("int8").packing == "bits"
    assert ternary.of_format("ternary").packing == "radix"
    assert {ternary.of_format(name).packing for name in ("book4", "binary-residual", "binary-rank1")} == {
        "bits"
    }
    recipe = RecipeOptions(
        format="ternary", packing="radix", lm_head="int8", rules=("*.q_proj=int4",)
    ).to_recipe()
    assert [rule.choice.packing for rule in recipe.rules] == ["bits", "bits"]


def test_a_recipe_that_cannot_work_is_refused_when_it_is_made():
    with pytest.raises(FormatError, match="unknown format"):
        Recipe(Choice("int9"))
    with pytest.raises(FormatError, match="has no zero-point"):
        Recipe(Choice(), (Rule("a", Choice("binary", zero_point="integer")),))


def test_the_record_of_a_recipe_holds_all_of_it():
    assert rules("a=int8:64").to_dict() == {
        "rotate": False,
        "default": {
            "format": "int4",
            "group_size": None,
            "zero_point": "none",
            "scale_dtype": None,
            "method": "mse",
            "keep": False,
            "packing": "bits",
            "activations": "none",
        },
        "rules": [
            {
                "match": "a",
                "format": "int8",
                "group_size": 64,
                "zero_point": "none",
                "scale_dtype": None,
                "method": "mse",
                "keep": False,
                "packing": "bits",
                "activations": "none",
            }
        ],
    }


def test_a_scheme_says_all_that_a_recipe_file_may_say_too(tmp_path):
    path = write(tmp_path, "[default]\nformat = 'int8'\ngroup_size = 128\nactivations = 'int8'")
    with pytest.raises(UsageError, match=r"--activations none and \[default\] of recipe .* \(int8\) differ"):
        RecipeOptions(scheme="W8A16", recipe=path).to_recipe()
    with pytest.raises(UsageError, match=r"--activations none and .* \(int8\) differ"):
        RecipeOptions(activations="none", recipe=path).to_recipe()
    same = write(tmp_path, "[default]\nformat = 'int8'\ngroup_size = 'channel'\nactivations = 'int8'")
    assert RecipeOptions(scheme="W8A8", recipe=same).to_recipe().default.activations == "int8"
