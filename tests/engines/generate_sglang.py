"""Generate with SGLang from each directory: `python generate_sglang.py OPTIONS PROMPTS TOKENS DIRECTORY...`.

OPTIONS are JSON arguments of `sglang.Engine`, PROMPTS a JSON list. Writes ids and log-probabilities to
`DIRECTORY.json`. `run_sglang.py` calls it in an environment with SGLang.
"""

import json
import sys
from pathlib import Path

#: A CPU without Intel's tiles has no other attention.
OPTIONS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_overlap_schedule": True,
    "disable_cuda_graph": True,
    "disable_radix_cache": True,
    "context_length": 512,
    "max_total_tokens": 2048,
    "max_running_requests": 4,
    "mem_fraction_static": 0.3,
    "log_level": "error",
}


def main() -> None:
    """Generate from each directory; stop at one that fails."""
    import sglang

    options = {**OPTIONS, **json.loads(sys.argv[1])}
    prompts, tokens = json.loads(sys.argv[2]), int(sys.argv[3])
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    for directory in sys.argv[4:]:
        engine = sglang.Engine(model_path=directory, **options)
        answers = engine.generate(prompts, sampling, return_logprob=True, logprob_start_len=0)
        rows = []
        for answer in (one["meta_info"] for one in answers):
            new = answer["output_token_logprobs"]
            rows.append(
                {
                    "prompt": [token for _, token, *_ in answer["input_token_logprobs"]],
                    "tokens": [token for _, token, *_ in new],
                    "logprobs": [value for value, *_ in new],
                }
            )
        Path(f"{directory}.json").write_text(json.dumps(rows))
        engine.shutdown()


if __name__ == "__main__":
    main()
