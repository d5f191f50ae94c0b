# NOT YET BUILT OR RUN: written for a machine with 8 RTX PRO 6000, which nobody has had yet.
#
#   docker build -f docker/tensorrt.Dockerfile -t trtree .
#   docker run --gpus all --ipc host --ulimit memlock=-1 trtree \
#     python -m trtree.runtime.generate --engine engines/demo --compare configs/demo/prompts.txt
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
      g++ libnccl2 openmpi-bin libopenmpi-dev python3 python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/*

ENV VIRTUAL_ENV=/opt/trtree PATH=/opt/trtree/bin:$PATH
RUN python3 -m venv $VIRTUAL_ENV

WORKDIR /opt/trtree/src
COPY . .
RUN pip install --no-cache-dir '.[tensorrt-rtx]'

# Builds need no GPU: the engine is ready when the container starts on one.
RUN python3 build_engine.py --backend tensorrt-rtx --sm 120 --tree-budget 16

CMD ["python3", "-m", "trtree.runtime.generate", "--engine", "engines/demo", "--compare", "configs/demo/prompts.txt"]
