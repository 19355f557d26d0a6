# SPDX-License-Identifier: Apache-2.0
"""Words of our own for keys and word lists: everyday adjectives, nouns and verbs.

RULER takes its words from the package `wonderwords` and from a list of English words; other words
make other samples, of the same form.
"""

from collections.abc import Sequence
from itertools import product

_ADJECTIVES = """
able amber ample ancient angry apt arid ashen awake azure bare basic bent big bitter black
bland blank blue blunt bold bony brave brief bright brisk broad bronze brown calm careful
cheap chilly civic clean clear clever cloudy coarse cold common cool copper cosy crisp curly
curved daily damp dark deep dense dim distant double dry dull dusty eager early easy edible
empty equal even exact faint fair false famous fancy fast fertile few fierce final fine firm
flat fluffy fond foreign formal free fresh frosty full gentle giant glad glossy golden good
grand grassy gray great green grim happy hard harsh hasty heavy hidden high hollow honest
huge humble icy idle inner ivory jolly keen kind large late lazy lean left level light little
local lone long loose loud low loyal lucky major mellow merry mild minor misty modern modest
moist mossy muddy narrow neat new nice noble noisy northern novel oaken odd old olive open
orange outer oval pale patient plain pleasant polite poor proud pure purple quick quiet rapid
rare raw ready real red remote rich rigid ripe rocky rough round royal rural rusty salty
sandy scarlet shallow sharp shiny short shy silent silky silver simple sleepy slim slow small
smooth snowy sober soft solar solid sour spare steady steep stern still stony stormy strange
strict strong sturdy subtle sudden sunny sweet swift tall tame tart tender thick thin tidy
tight tiny tired tough true unique upper urban useful vague vast vivid warm weak weary wet
white whole wide wild wise witty wooden woolly yellow young
"""
ADJECTIVES = tuple(_ADJECTIVES.split())
_NOUNS = """
acorn actor alley anchor angle apple apron arch arrow attic aunt avenue badge bag baker ball
bamboo banjo bank barn barrel basin basket beach beacon bean bear beard beaver bed bee bell
belt bench berry bird blanket blossom board boat bone book boot border bottle bowl box branch
bread brick bridge broom brother brush bucket bush butter button cabin cable cake camel
camera camp canal candle canoe canyon cap captain card cargo carpet carrot cart castle cat
cattle cave cedar cellar chain chair chalk chapel chart cheese cherry chess chest chimney
circle city cliff clock cloth cloud clover coach coal coast coat coin collar comb compass
copper coral cord corn corner cottage cotton couch cousin crane crayon creek crow crown cup
curtain cushion daisy dam dawn deck deer desert desk diamond dinner dish doctor dolphin donkey
door dove dragon drawer dream dress drum duck dune dust eagle ear elbow elk elm ember engine
envelope eye fabric falcon farm feather fence fern ferry fiddle field fig finger fire fish
flag flame flask flood floor flour flower flute fog folder forest fork fort fountain fox frame
friend frog fruit garden garlic gate ghost glacier glass globe glove goat goose grain grape
grass gravel guitar hall hammer harbor harp hat hawk hay hazel heart hedge helmet hen hill hive
holly honey hook horn horse hotel house hut ink iron island ivy jacket jar jewel judge jug
jungle kettle key king kitchen kite knee knife ladder lake lamp lantern lark lawn leaf leather
lemon lentil letter library lily lime lion lizard lobby log lumber lunch map maple marble
market mask meadow medal melon mill mint mirror monk moon moose moss moth motor mountain mouse
museum music nail napkin needle nest net night nurse nut oak oar oat ocean onion orchard
orchid otter oven owl ox oyster paddle page palace palm panda paper parcel park parrot path
peach pear pearl pebble pencil pepper piano picnic pie pig pigeon pillow pilot pine pipe plain
planet plate plum pocket poem pond pony poppy porch port potato pot powder prairie prince
pumpkin puppet purse quail quarry queen quilt rabbit radio raft rail rain raven reed reef
ribbon rice ring river road robin rock roof room root rope rose rug sail salad salmon salt
sand sandal sauce saw scarf school sea seal seat seed shadow sheep shelf shell ship shirt shoe
shop shore shovel sister skirt sky slate sled sleeve smoke snail snow soap sock soil song soup
spade sparrow spider spoon spring squash stable stair stamp star station steam stem stone
storm stove straw stream street string suit sun swan sword table tail tailor tea teacher tent
thread throne thumb tiger timber toast toe tomato tooth torch tower town toy trail train tray
treasure tree trout trumpet trunk tulip tunnel turkey turtle uncle valley vase velvet vessel
village vine violin voyage wagon wall walnut water wave wax wheat wheel whistle willow window
wing winter wolf wood wool wren yard yarn zebra
"""
NOUNS = tuple(_NOUNS.split())
_VERBS = """
accept admire agree allow amuse announce answer appear argue arrange arrive ask attach avoid
bake balance bathe beg begin behave belong blink boil borrow bounce bow breathe bring build
bump bury buy call carry carve cause change charge chase cheer chew choose clap climb close
collect compare complain confess connect consider cook copy cough count cover crawl cross cry
dance decide deliver describe dig discover divide drag drift drink drive drop earn eat enjoy
enter escape examine explain fasten fetch fill find float fold follow gather gaze give greet
grow guess hang heal hear help hide hope hug hunt hurry imagine invite join jump keep kick
kneel knit laugh lead learn lend lift listen live measure melt mend mix move nod notice obey
observe offer order pack paint pause pedal peel pick plan plant play point polish pour pray
prepare press promise protect pull punch push race reach read receive remember repair repeat
reply rescue rest return ride rinse rise rub run sail save scatter scold scrub search sell
send serve sew shake share shave shout show sing sit sketch skip sleep slide smile sneeze
snore solve speak spell spend spill spin stand stare start stay stir stop stretch study swim
take talk taste teach tell thank think throw tie touch trade travel trust try turn visit wait
wake walk wander wash watch wave wear weave weigh whisper win wink wish wonder work worry wrap
write yawn yell
"""
VERBS = tuple(_VERBS.split())


def distinct(*lists: Sequence[str]) -> tuple[str, ...]:
    """Return the words of several lists in order, each once."""
    return tuple(dict.fromkeys(word for words in lists for word in words))


def compounds(nouns: Sequence[str]) -> tuple[str, ...]:
    """Return compounds of two nouns, such as `lampbridge`, for lists of thousands of words."""
    pairs = (f"{first}{second}" for first, second in product(nouns, nouns) if first != second)
    return tuple(dict.fromkeys(pairs))
