from .spool import Spool as Spool
