"""Print the OpenAPI of vLLM's app as JSON, without our endpoints and with them: `openapi.py MODEL`."""

import json
import os
import sys

os.environ["VLLM_PLUGINS"] = ""

from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser


def openapi() -> dict:
    args = make_arg_parser(FlexibleArgumentParser()).parse_args([sys.argv[1]])
    return build_app(args, ("generate",)).openapi()


stock = openapi()
os.environ["VLLM_PLUGINS"] = "vllm_rollout"
print("RESULT " + json.dumps({"stock": stock, "ours": openapi()}))
