"""`python -m loradock.gateway.server CONFIG`: run a gateway process."""

import sys

from loradock.gateway.server.process import main

sys.exit(main())
