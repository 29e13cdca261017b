from .spaces import space_from_json as space_from_json
from .spaces import space_to_json as space_to_json
