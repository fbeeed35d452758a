"""Access without a key in every --rollout-compat mode."""

import pytest

from tests.kernel.api.test_keys import (
    assert_another_site_gets_in_nowhere,
    assert_no_key_opens,
    assert_the_admin_key_opens_all,
    opened_by_the_api_key,
)
from vllm_rollout.parts.trainers.api.trainers import COMPAT

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("trainers", [*((trainer,) for trainer in sorted(COMPAT)), tuple(COMPAT)])
async def test_without_a_key_nobody_gets_in_where_it_is_not_said(app_of, trainers):
    await assert_no_key_opens(app_of, *trainers)


async def test_with_the_api_key_alone_nobody_changes_the_weights_of_all(app_of):
    assert ("POST", "/update_weights") not in await opened_by_the_api_key(app_of, *COMPAT), "of a folder"


async def test_the_admin_key_opens_the_endpoints_of_trainers_too(app_of):
    await assert_the_admin_key_opens_all(app_of(*COMPAT))


async def test_a_page_of_another_site_gets_into_no_endpoint_of_trainers(app_of):
    await assert_another_site_gets_in_nowhere(app_of(*COMPAT))
