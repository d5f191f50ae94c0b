"""The HTTP server: OpenAI's API over a Service."""
