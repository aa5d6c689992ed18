"""`python -m engine.worker`: one engine process."""

from engine.worker.process import end, main

end(main())
