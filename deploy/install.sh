#!/bin/sh
# Creates /opt/triptych, an environment with the dependencies of a service: install.sh frontend|engine|coordinator
set -eu
python3 - "$1" > /requirements.txt <<'END'
import sys
import tomllib

with open("/pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
print(*project["dependencies"], *project["optional-dependencies"][sys.argv[1]], sep="\n")
END
python3 -m venv /opt/triptych
/opt/triptych/bin/pip install --quiet --no-cache-dir --constraint /constraints.txt \
    ${EXTRA_INDEX_URL:+--extra-index-url "$EXTRA_INDEX_URL"} --requirement /requirements.txt
# Packages are never installed into a running container.
/opt/triptych/bin/pip uninstall --quiet --yes setuptools pip
