"""The dozen questions that `neo demo` asks, short and long; the texts were written for this purpose."""

_TIDES = """\
The harbour of Grimsund dries out twice a day. At low water the fishing boats lie on the mud like sleeping cattle,
and people walk between them to scrape barnacles, to paint, or to argue about the price of diesel. Six hours later
the same place is four metres deep. For three hundred years the harbour master has rung a bell an hour before the
water returns. Last spring the bell was replaced by a message to every telephone in town. Within two weeks a van,
two dogs and a teacher had been rescued from the mud, because nobody reads messages while scraping barnacles. In
June the council voted, with one abstention, to hang up the bell again, and the telephone company now sponsors a new
rope for it."""

_LIBRARY = """\
From: Nadia Okafor. To: all staff of the city library. Subject: the move. Dear colleagues, as you know the main
branch closes on Monday 3 March for the renovation of the roof, and reopens, if the weather is kind, on Friday 16
May. During that time the children's books move to the swimming pool's old cafeteria in Mill Street, open every day
from 10 to 18. The music collection stays where it is, but can only be borrowed by ordering on line; orders are
handed out in Mill Street on Wednesdays. The reading room has no substitute, and the university has kindly offered
forty seats to holders of our card. Volunteers are wanted for carrying boxes on 1 and 2 March; there will be soup.
Please do not promise anybody parking places: there are none."""

_BATTERY = """\
A lithium-ion battery ages in two ways. Calendar ageing happens even when the battery lies in a drawer: the
electrolyte slowly reacts with the graphite of the negative electrode and builds a film that locks lithium away.
Heat and a high state of charge speed it up. Cycle ageing comes from use: every time lithium enters the graphite,
the particles swell by about ten percent, and the film cracks and grows again. Charging fast in the cold is the
worst case, because lithium is then deposited as metal on the surface instead of moving inside. For these reasons
car makers recommend a charge between twenty and eighty percent, warm the battery before fast charging, and cool it
in summer. A battery treated like that keeps eighty percent of its capacity for fifteen hundred cycles or more; one
that is always full in a hot garage may lose as much in four years without being driven at all."""

_TRIAL = """\
In a trial with 412 adults who slept badly, half were asked to go to bed only when tired and to get up at the same
time every day; the other half received a leaflet with general advice. After eight weeks the first group fell asleep
19 minutes faster on average and woke up less often, while the second had gained 4 minutes. The effect was the same
for men and women, and larger for people over fifty. After a year the difference had shrunk to 9 minutes, mostly
because many had gone back to sleeping late on weekends. The authors note that the participants knew which group
they were in, that sleep was measured by diaries rather than in a laboratory, and that one in six left the study
early."""

_ROBOT = """\
The robot had been built to water the tomatoes in greenhouse nine, and for two years it had done nothing else. It
knew each of the eight hundred plants by its number. On the first cold night of October the heating failed, and the
robot, whose rules said nothing about frost, rolled along the rows and noticed that plant 417 was bending. It had no
words for what it did next. It emptied its tank, drove to the laundry of the gardeners' house, and took every towel
that hung on the line."""

_COFFEE = """\
Our family has roasted coffee in the same street since 1952. We buy from nine farms, most of which we have visited,
and we roast every Tuesday and Friday. The bags carry the date of roasting, not a date of expiry, because we would
like you to drink it fresh. Until now we sold only in the shop. From next month on we send coffee by post, in boxes
of two, four or six bags, and a subscriber can skip a month, change the sort or stop whenever he likes."""

_BUG = """\
def average_per_day(sales):
    totals = {}
    for day, amount in sales:
        if day in totals:
            totals[day] = amount
        else:
            totals[day] = amount
    return sum(totals.values()) / len(sales)

print(average_per_day([("Mon", 10), ("Mon", 30), ("Tue", 20)]))   # I expected 30.0"""

_DEBATE = """\
Anna: We should close the old bridge to cars. It is four hundred years old, the stones are loose, and the new one is
only two kilometres away. Cyclists and schoolchildren are squeezed against the wall every morning. Bruno: The shops
on the east bank live from people who stop on their way. Two kilometres are nothing for you, but my customers will
simply go to the mall. Anna: When Marktstrasse was closed, trade there went up by a tenth. Bruno: That was in the
centre, with a tram stop at each end. Here there is neither. Repair the bridge, allow cars in one direction only,
and nobody loses anything. Anna: The repair costs two million."""

_RECIPE = """\
I have half a pumpkin, three onions, a tin of chickpeas, some rice, one lemon, a piece of hard cheese, eggs, and the
usual spices. There is no oven in this flat, only two hot plates and one big pot. Two friends come for dinner in an
hour and a half, one of whom does not eat anything that comes from animals."""

_WEATHER = """\
Yesterday evening's front has brought snow down to 900 metres. During the morning the last showers leave towards the
east, and the sun comes out from the west. In the valleys it stays foggy until noon. The afternoon is bright but
cold, with 4 degrees in the lowlands and minus 6 on the passes; a strong northerly wind makes it feel colder. The
avalanche danger above 2000 metres is considerable. Tomorrow high pressure takes over, with frost at night and sunny
days until at least Thursday. At the weekend a warm front from the Atlantic probably brings rain up to great
heights, and rivers may rise quickly."""

_PLANETS = """\
Light from the Sun needs 8 minutes and 20 seconds to the Earth and about 43 minutes to Jupiter. A radio signal
travels at the same speed. A probe in orbit around Jupiter therefore cannot be steered like a toy car: whoever sees
something on the screen sees the past, and whatever he commands arrives in the future."""

PROMPTS: tuple[str, ...] = (
    f"Summarise this story in two sentences.\n\n{_TIDES}",
    f"{_LIBRARY}\n\nWhen does the main branch close, when does it reopen, and where are the children's books now?",
    f"{_BATTERY}\n\nExplain to a ten-year-old why a car battery should not always be charged to 100 percent.",
    f"Read this summary of a study.\n\n{_TRIAL}\n\nList three reasons to be careful with the result.",
    f"{_ROBOT}\n\nContinue the story with one more paragraph.",
    f"Write a short and friendly e-mail to our customers from these notes.\n\n{_COFFEE}",
    f"What is wrong with this Python function, and how do I correct it?\n\n{_BUG}",
    f"{_DEBATE}\n\nState Anna's and Bruno's strongest arguments in one sentence each.",
    f"{_RECIPE}\n\nWhat can I cook? Give me a plan with times.",
    f"Turn this forecast into advice for somebody who wants to hike tomorrow.\n\n{_WEATHER}",
    f"{_PLANETS}\n\nA probe near Jupiter sees an obstacle. How soon can a command from Earth reach it?",
    "Write a poem of eight lines about a lighthouse keeper who is afraid of the dark.",
)
