"""An OpenAI-compatible server on the engine."""
