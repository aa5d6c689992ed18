"""The page: one file, allowed to run its own script and nothing else."""

import re

from loradock.gateway.page import PAGE, content_security_policy


def test_the_page_is_served_with_its_policy(served):
    response = served.get("/")
    assert response.headers["content-type"].startswith("text/html")
    assert response.text == PAGE.read_text()
    policy = response.headers["content-security-policy"]
    assert policy == content_security_policy(response.text)
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_the_page_refers_to_no_other_host():
    text = PAGE.read_text()
    # The empty icon keeps browsers from requesting one.
    assert re.findall(r"(?:src|href|action)\s*=\s*\S+", text) == ['href="data:,">']
    # Names of XML are not fetched.
    addresses = set(re.findall(r"https?://[^\"'\s<>]+", text))
    assert addresses <= {"http://www.w3.org/2000/svg"}
    assert re.findall(r"@import|url\(", text) == []


def test_the_policy_has_a_digest_per_block():
    policy = content_security_policy("<script>a</script><style>b</style><script>c</script>")
    assert policy.count("'sha256-") == 3
    assert policy != content_security_policy("<script>x</script><style>b</style>")
