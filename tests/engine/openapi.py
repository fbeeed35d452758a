"""Print the OpenAPI of vLLM's app as JSON: `openapi.py MODEL`, with the endpoint plugins that VLLM_PLUGINS names."""

import json
import sys

from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

args = make_arg_parser(FlexibleArgumentParser()).parse_args([sys.argv[1]])
print("RESULT " + json.dumps(build_app(args, ("generate",)).openapi()))
