"""Tokens of texts by llama.cpp: `python read_tokens.py ASKED ANSWERS`.

ASKED is a JSON object of names of GGUF files and their texts. ANSWERS gets a line of ids for each file, as a
pair of its name and lists of ids. `tokens.py` calls it in an environment with llama-cpp-python. llama.cpp may
end the process: lines that are missing then were not answered.
"""

import json
import sys
from pathlib import Path


def main() -> None:
    """Tokenize the texts of each file, with special tokens around and within them."""
    from llama_cpp import Llama

    with Path(sys.argv[2]).open("w", encoding="utf-8") as answers:
        for name, texts in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")).items():
            words = Llama(name, vocab_only=True, verbose=False)
            ids = [words.tokenize(text.encode(), add_bos=True, special=True) for text in texts]
            answers.write(json.dumps([name, ids]) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
