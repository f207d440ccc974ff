"""Write stories.txt: stories that the bundled model tells itself, one per paragraph, always the same.

Run as `python examples/make_stories.py` from anywhere. The text is in the model's own distribution, so
perplexity on it is low and every divergence comes from the quantization.
"""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

EXAMPLES = Path(__file__).parent
STORIES = 48


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLES / "stories260K")
    model = AutoModelForCausalLM.from_pretrained(EXAMPLES / "stories260K").eval()
    torch.manual_seed(0)
    prompt = torch.full((STORIES, 1), tokenizer.bos_token_id)
    with torch.inference_mode():
        stories = model.generate(prompt, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=300)
    texts = [tokenizer.decode(story, skip_special_tokens=True).strip() for story in stories]
    (EXAMPLES / "stories.txt").write_text("\n\n".join(texts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
