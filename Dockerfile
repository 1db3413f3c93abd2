# The command line with the CPU build of PyTorch:
#   docker build -t esm-turbo .
#   docker run --rm -v "$PWD:/data" esm-turbo score targets.fasta peptides.csv --out scores.csv
# With CUDA: docker build --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 -t esm-turbo .
#   and docker run --gpus all ...
FROM python:3.12-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY pyproject.toml setup.py README.md LICENSE constraints.txt /src/
COPY calibration_data /src/calibration_data
COPY esm_turbo /src/esm_turbo
RUN pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" -c /src/constraints.txt "/src[h5]"
WORKDIR /data
ENTRYPOINT ["esm-turbo"]
CMD ["info"]
