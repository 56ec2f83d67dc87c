# The whole of Ullage beside a PyTorch that is there: docker build -t ullage . && docker run --gpus all ullage doctor
ARG BASE=pytorch/pytorch:2.11.0-cuda13.0-cudnn9-runtime
FROM ${BASE}
WORKDIR /src
COPY . .
RUN python -m pip install --no-cache-dir '.[execute,report,remote,metrics]'
WORKDIR /work
ENTRYPOINT ["ullage"]
