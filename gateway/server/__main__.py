"""`python -m gateway.server CONFIG`: run a gateway process."""

import sys

from gateway.server.process import main

sys.exit(main())
