import os
import time
from datetime import datetime, timezone
from zoneinfo import ZoneInfo

noon = datetime(2024, 7, 1, 12, tzinfo=timezone.utc)
assert noon.astimezone(ZoneInfo("America/St_Johns")).isoformat() == "2024-07-01T09:30:00-02:30"
os.environ["TZ"] = "Asia/Kathmandu"
time.tzset()
assert time.strftime("%H:%M", time.localtime(0)) == "05:30"
print("ok zoneinfo_names")
