# The gateway image, built only from the package indexes of Debian and Python: no other image or repository.
#
#   make image                                      or: docker build --build-arg BASE_IMAGE=... --tag polar-gym .
#   docker run --rm polar-gym doctor
#
# The base may be Debian 13 or newer (older ones have a Node too old for the harnesses), also an imported tar.
# Harnesses are not in the image: they are installed at first use into ~/.cache/polar-gym; give that path a volume.
# The bubblewrap runtime makes user namespaces, which Docker's default profile forbids inside a container: add
#   --security-opt seccomp=unconfined --security-opt apparmor=unconfined --security-opt systempaths=unconfined
# The image trusts the machine's certificate authorities, which `make image` puts into build/ca-certificates.
ARG BASE_IMAGE=debian:13-slim
FROM ${BASE_IMAGE}

RUN apt-get update -qq \
 && DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends \
      bubblewrap ca-certificates git nodejs npm python3 python3-venv ripgrep tini \
 && rm -rf /var/lib/apt/lists/*

# LICENSE is copied only because COPY needs at least one file that exists.
COPY LICENSE build/ca-certificates/*.crt /usr/local/share/ca-certificates/
RUN update-ca-certificates
ENV NODE_EXTRA_CA_CERTS=/etc/ssl/certs/ca-certificates.crt \
    PIP_CERT=/etc/ssl/certs/ca-certificates.crt \
    PATH=/opt/polar-gym/bin:$PATH

COPY pyproject.toml README.md LICENSE /src/
COPY conf /src/conf
COPY recipes /src/recipes
COPY polar_gym /src/polar_gym
RUN python3 -m venv /opt/polar-gym \
 && /opt/polar-gym/bin/pip install -qq --no-cache-dir /src \
 && rm -rf /src

RUN useradd --create-home --uid 1000 polar
USER polar
RUN mkdir -p /home/polar/.cache/polar-gym
WORKDIR /home/polar
ENTRYPOINT ["tini", "--", "polar-gym"]
