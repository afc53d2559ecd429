# Slipstream with vLLM for CPUs: docker build -f containers/cpu.Dockerfile -t slipstream:cpu .
FROM python:3.12-slim-bookworm
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ git libnuma1 make \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home slipstream
WORKDIR /home/slipstream/slipstream
COPY --chown=slipstream . .
USER slipstream
RUN make install
ENV PATH=/home/slipstream/slipstream/.venv/bin:$PATH
ENTRYPOINT ["slipstream"]
CMD ["--help"]
