"""A comparison as one page to look at, and as a picture."""

from jzero.compare.page.document import page as page
from jzero.compare.page.picture import picture as picture
from jzero.compare.page.picture import require_extra as require_extra
