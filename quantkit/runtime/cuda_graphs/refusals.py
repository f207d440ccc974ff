"""Reasons why a forward is not captured as a CUDA graph, or not run from a list of operations on a CPU.

The forward then runs module by module, and a warning has the text. docs/running.md lists the same texts.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Refusal:
    """Reason for not capturing what `scope` names, such as a decoding step or all prompts of a model.

    `text` is a template such as "{name} is a {kind}": `because(name=..., kind=...)` fills the fields in.
    """

    scope: str
    text: str

    def because(self, **values: object) -> str:
        """Return the text with `values` in place of the fields in braces."""
        return self.text.format(**values)


_MODEL = "all steps and prompts of a model"
TRAINING = Refusal(_MODEL, "the model is in training mode; call model.eval()")
DIVIDED = Refusal(
    _MODEL,
    "the model is divided among devices or offloaded; load it on one GPU, with device_map='cuda:0', where it "
    "fits",
)
RANKS = Refusal(
    _MODEL,
    "ranks share the model (tensor parallelism) and sum through {backend}, not nccl; load it on GPUs, or on "
    "one where it fits",
)
ADAPTERS = Refusal(
    _MODEL,
    "{module!r} is a {kind} of PEFT, and only plain LoRA of linears and experts is captured; unload it where "
    "it is not needed",
)
ADAPTERS_OF_RANKS = Refusal(
    _MODEL, "ranks share a model with adapters; load it on one GPU, or unload them where they are not needed"
)
HOOK = Refusal(_MODEL, "a hook of {module!r} is to be called at each; remove it")
MIXED_LAYERS = Refusal(_MODEL, "the model has layers of {kind}")
NO_STATIC_CACHE = Refusal(_MODEL, "transformers does not run the model with a static cache")

_CALL = "a step or prompt"
#: `what` is an output_... option, a gradient, a tangent or another transform, or autocast.
ASKED = Refusal(_CALL, "{what} is asked for")
READS_NUMBER = Refusal(_CALL, "the model asks the GPU for a number")
SENDS_NUMBER = Refusal(_CALL, "the model gives the GPU a number of the host")
SWITCHED = Refusal(
    _CALL, "more than {most} sets of adapters and scalings were active; use fewer, or load a model for each"
)
UNMERGES = Refusal(_CALL, "a merged adapter is disabled, and PEFT subtracts it now; call unmerge_adapter()")
MORE_OUTPUTS = Refusal(_CALL, "the model returns {names}")

_STEP = "a decoding step"
NOT_ONE_TOKEN = Refusal(_STEP, "it is not one token of each sequence")
NOT_STATIC = Refusal(_STEP, "the cache is not one of static layers for all keys and values")
EMPTY_CACHE = Refusal(_STEP, "the cache is empty")
SEVERAL_DEVICES = Refusal(_STEP, "the model is on several devices")
OTHER_INPUT = Refusal(_STEP, "{name} is a {kind}")
COUNTS_ON_HOST = Refusal(_STEP, "the cache counts its tokens on the host")
OTHER_RANK = Refusal(_STEP, "another rank could not capture its share")

#: These prompts run kernel by kernel without a warning: most are too long to gain, or asked for otherwise.
_PROMPT = "a prompt, without a warning"
NOT_A_PROMPT = Refusal(_PROMPT, "it is not two tokens or more of each sequence, on the model's GPU")
LONG_PROMPT = Refusal(_PROMPT, "padded it has more than {most} tokens, or more than the model has positions")
OTHER_CACHE = Refusal(_PROMPT, "its cache has a sliding window or other layers, or is offloaded")
MORE_ASKED = Refusal(_PROMPT, "more than the logits of the last token and the cache is asked for")
NO_PADDING = Refusal(_PROMPT, "{name} cannot be padded")

_PROMPTS = "all prompts of a model"
IMAGES = Refusal(_PROMPTS, "the model may remember where images of a prompt are")
BIDIRECTIONAL = Refusal(_PROMPTS, "tokens attend to those after them")
NO_PARAMETER = Refusal(_PROMPTS, "the model takes no {name}")
NUMBER_ONLY = Refusal(_PROMPTS, "the model takes logits_to_keep as a number alone")
SHARED = Refusal(_PROMPTS, "ranks share the model")
OTHER_LOGITS = Refusal(_PROMPTS, "the model returns logits of shape {shape} for one token")
NO_MEMORY = Refusal(_PROMPTS, "there is too little memory for graphs")

_CPU = "a step on a CPU"
EXPERTS = Refusal(_CPU, "Python reads which experts are chosen")
BRANCHES = Refusal(_CPU, "Python decides by numbers of {operation} what runs")
UNSEEN = Refusal(_CPU, "what a step computes is not what torch sees of it")

#: All of them, in the order of the docs.
REFUSALS = tuple(value for value in tuple(globals().values()) if isinstance(value, Refusal))
