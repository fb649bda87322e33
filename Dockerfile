# Runs any kvstore command: docker run kvstore master --listen 0.0.0.0:7070
# A mount needs: --device /dev/fuse --cap-add SYS_ADMIN, and a bind mount with shared propagation.
FROM python:3.11-slim-bookworm AS build
# pyfuse3 has no wheels. Debian keeps only the newest version of a stable release, so a pinned one would soon not build.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev libfuse3-dev pkg-config \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml constraints.txt ./
COPY kvstore ./kvstore
RUN python -m venv /opt/kvstore \
    && /opt/kvstore/bin/pip install --no-cache-dir --constraint constraints.txt '.[fuse]'

FROM python:3.11-slim-bookworm
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends fuse3 tini \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/kvstore /opt/kvstore
ENV PATH=/opt/kvstore/bin:$PATH
# tini: a keeper that dies leaves processes behind, and somebody has to reap them.
ENTRYPOINT ["tini", "--", "kvstore"]
CMD ["--help"]
