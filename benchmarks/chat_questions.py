"""Ask chat models ten simple questions, and count the right answers.

    python benchmarks/chat_questions.py ORIGINAL [PACKED...] [--device cuda] [--json FILE]

Answers are greedy, in the model's chat template, at most 48 tokens. One is right if it has the word that is
expected, in upper or lower case. The questions were chosen before any training, among those that
SmolLM2-135M-Instruct answers.
"""

import argparse
import json
import re
from pathlib import Path

#: Questions, and what a right answer says: a regular expression.
QUESTIONS = {
    "What is the capital of France?": "Paris",
    "What is the capital of Germany?": "Berlin",
    "What color is the sky on a clear day?": "blue",
    "How many days are in a week?": "7|seven",
    "What is the chemical formula of water?": "H2O|H₂O",
    "What is the opposite of hot?": "cold",
    "What language is spoken in Brazil?": "Portuguese",
    "Which animal says meow?": "cats?",
    "What is the largest ocean on Earth?": "Pacific",
    "What star does the Earth orbit around?": "Sun",
}
MOST = 48


def answers(directory: Path, device: str) -> list[str]:
    """Return what a model answers to each of `QUESTIONS`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import quantkit  # noqa: F401 - makes packed directories known

    words = AutoTokenizer.from_pretrained(directory)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, device_map=device)
    found = []
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        given = words.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        tokens = model.generate(**given.to(device), max_new_tokens=MOST, do_sample=False)
        found.append(words.decode(tokens[0, given["input_ids"].shape[1] :], skip_special_tokens=True).strip())
    return found


def is_right(expected: str, answer: str) -> bool:
    """Return whether an answer has the expected word."""
    return re.search(rf"\b({expected})\b", answer, re.IGNORECASE) is not None


def main() -> None:
    """Ask all models and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    found = []
    for model in asked.models:
        said = answers(model, asked.device)
        right = [is_right(*pair) for pair in zip(QUESTIONS.values(), said, strict=True)]
        found.append({"model": model.name, "right": sum(right), "answers": said})
        print(f"\n{model.name}: {sum(right)} of {len(QUESTIONS)}")
        for question, answer, good in zip(QUESTIONS, said, right, strict=True):
            print(f"  {'right' if good else 'WRONG'}  {question}  {answer!r}", flush=True)
    if asked.json:
        asked.json.write_text(json.dumps({"questions": QUESTIONS, "models": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
