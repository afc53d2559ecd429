# Slipstream with vLLM for NVIDIA GPUs: docker build -f containers/gpu.Dockerfile -t slipstream:gpu .
# Run it with `--gpus all --ipc host`. This file was not built on a GPU machine yet.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04
RUN apt-get update \
    && apt-get install -y --no-install-recommends git make python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home slipstream
WORKDIR /home/slipstream/slipstream
COPY --chown=slipstream . .
USER slipstream
RUN python3 scripts/install.py --gpu
ENV PATH=/home/slipstream/slipstream/.venv/bin:$PATH
ENTRYPOINT ["slipstream"]
CMD ["--help"]
