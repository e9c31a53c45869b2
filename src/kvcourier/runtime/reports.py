"""What an endpoint tells its engine; defined by the core, used through the runtime."""

from kvcourier.core.outcomes import Outcome, Report, Side

__all__ = ["Outcome", "Report", "Side"]
