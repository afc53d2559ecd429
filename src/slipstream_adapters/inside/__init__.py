"""What runs of `verifiers` in an environment process, in its interpreter, beside `slipstream.envs.hosted.inside`."""
