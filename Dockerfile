ARG BASE=pytorch/pytorch:2.11.0-cuda13.0-cudnn9-runtime

# The page alone, as a container or a Space: docker build --target web -t ullage-web . && docker run -p 7860:7860 \
#   -e ULLAGE_WEB_HOSTS=localhost ullage-web. With EXTRAS=web,execute,finetune it plans adapters and captured models too.
FROM python:3.13-slim AS web
ARG EXTRAS=web
WORKDIR /src
COPY . .
RUN python -m pip install --no-cache-dir ".[${EXTRAS}]" && useradd --create-home page
USER page
WORKDIR /home/page
EXPOSE 7860
CMD ["uvicorn", "ullage.web.app:app", "--host", "0.0.0.0", "--port", "7860", "--no-proxy-headers"]

# The whole of Ullage beside a PyTorch that is there: docker build -t ullage . && docker run --gpus all ullage doctor
FROM ${BASE}
WORKDIR /src
COPY . .
RUN python -m pip install --no-cache-dir '.[execute,report,remote,web]'
WORKDIR /work
ENTRYPOINT ["ullage"]
