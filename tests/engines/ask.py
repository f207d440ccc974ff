"""Ask a server by the openai client: `python ask.py URL ANSWERS`, for a completion, a stream and a chat.

Writes ids, log-probabilities and text of each to the JSON file ANSWERS. `serve.py` calls it in an environment
with vLLM, which brings the client.
"""

import json
import sys
from pathlib import Path
from typing import Any

PROMPT = "The history of the"
CHAT = ({"role": "user", "content": "What is the capital of France? Give 2 reasons."},)
TOKENS = 32
#: Of vLLM: all tokens, and their ids.
MORE = {"ignore_eos": True, "return_token_ids": True}


def completion(client: Any, model: str, **options: Any) -> Any:
    """Ask for the continuation of `PROMPT`."""
    return client.completions.create(
        model=model, prompt=PROMPT, max_tokens=TOKENS, temperature=0, logprobs=1, extra_body=MORE, **options
    )


def answers(client: Any, model: str) -> dict[str, Any]:
    """Return the answer to each kind of request."""
    whole = completion(client, model)
    choice = whole.choices[0]
    found = {
        "completion": {
            "prompt": choice.prompt_token_ids,
            "tokens": choice.token_ids,
            "logprobs": choice.logprobs.token_logprobs,
            "text": choice.text,
        }
    }
    parts = [part.choices[0] for part in completion(client, model, stream=True) if part.choices]
    found["stream"] = {
        "prompt": parts[0].prompt_token_ids,
        "tokens": [token for part in parts for token in part.token_ids or []],
        "logprobs": [one for part in parts if part.logprobs for one in part.logprobs.token_logprobs],
        "text": "".join(part.text for part in parts),
        "parts": len(parts),
    }
    whole = client.chat.completions.create(
        model=model, messages=CHAT, max_tokens=TOKENS, temperature=0, logprobs=True, extra_body=MORE
    )
    choice = whole.choices[0]
    found["chat"] = {
        "prompt": whole.prompt_token_ids,
        "tokens": choice.token_ids,
        "logprobs": [one.logprob for one in choice.logprobs.content],
        "text": choice.message.content,
    }
    return found


def main() -> None:
    """Ask the one model of the server."""
    from openai import OpenAI

    client = OpenAI(base_url=sys.argv[1], api_key="none")
    model = client.models.list().data[0].id
    Path(sys.argv[2]).write_text(json.dumps(answers(client, model)), encoding="utf-8")


if __name__ == "__main__":
    main()
