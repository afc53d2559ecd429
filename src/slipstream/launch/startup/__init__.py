"""What happens before the first step: vLLM is imported early, compiled code is cached, stages are timed."""
