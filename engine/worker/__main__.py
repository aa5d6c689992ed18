"""`python -m loradock.engine.worker`: one engine process."""

from loradock.engine.models.library.light_imports import import_transformers

import_transformers()

from loradock.engine.worker.process import end, main  # noqa: E402 - see there

end(main())
