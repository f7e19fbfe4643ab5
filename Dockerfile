# docker build -t ranker . ; docker run --gpus all --shm-size 8g -v "$PWD/outputs:/home/ranker/app/outputs" ranker model=monobert trainer.devices=8
FROM nvidia/cuda:13.0.1-cudnn-runtime-ubuntu24.04

RUN apt-get update \
    && apt-get install -y --no-install-recommends python3.12 python3.12-venv build-essential python3.12-dev git \
    && rm -rf /var/lib/apt/lists/*

# no root user: files that a run writes to a mounted folder then belong to a normal user
RUN useradd --create-home --uid 10001 ranker
USER ranker
WORKDIR /home/ranker/app

ENV VIRTUAL_ENV=/home/ranker/venv PATH=/home/ranker/venv/bin:$PATH PYTHONUNBUFFERED=1
RUN python3.12 -m venv "$VIRTUAL_ENV"

# dependencies first, so that a change of the source does not reinstall torch
COPY --chown=ranker pyproject.toml README.md ./
RUN mkdir ranker && touch ranker/__init__.py && pip install --no-cache-dir -e '.[gpu,demo]'
COPY --chown=ranker . .

ENTRYPOINT ["python", "train.py"]
