"""Lightning, Accelerate and the Hugging Face Trainer; each module needs the extra of its name."""
