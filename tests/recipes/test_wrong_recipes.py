"""Must show 5 of the training engine: what is wrong with a recipe is said in one line, with the key and the remedy.

What only a trainer can know (a given model's channels and classes, the number of processes) is tested with the trainer.
"""

from pathlib import Path

import pytest

from tcm.foundation.errors import TcmError
from tcm.recipes.resolve import resolve

WRONG_OVERRIDES = {
    # misspelt and unknown keys
    "digits truncated.t_prim=1.5": "digits: truncated.t_prim is not a known key; did you mean 't_prime'?",
    "digits truncate.t_prime=1.5": (
        "override 'truncate.t_prime': 'truncate' is neither a key nor a stage of this recipe; "
        "did you mean 'truncated.t_prime'?"
    ),
    "digits t_prime=1.5": (
        "override 't_prime': 't_prime' is neither a key nor a stage of this recipe; did you mean 'truncated.t_prime'?"
    ),
    "digits xyz=1": (
        "override 'xyz': 'xyz' is neither a key nor a stage of this recipe; "
        "the stages are diffusion, consistency, truncated"
    ),
    "digits network.chanels=32": "digits: network.chanels is not a known key; did you mean 'channels'?",
    "digits consistency.t_prime=1.0": (
        "digits: consistency.t_prime is not a known key; remove it or correct its spelling"
    ),
    "digits truncated.times.gamma=2.0": (
        "digits: truncated.times.gamma is not a known key; remove it or correct its spelling"
    ),
    # not an override
    "digits seed": "override 'seed' is not of the form key=value; write it like truncated.t_prime=1.5",
    "digits truncated..steps=3": (
        "override 'truncated..steps=3' is not of the form key=value; write it like truncated.t_prime=1.5"
    ),
    "digits seed=1 seed=2": "override 'seed=2' is given twice or contradicts another one; give it once",
    "digits data=3 data.path=x": "override 'data.path=x' contradicts another override; give one of the two",
    # types and single values
    "digits consistency.steps=many": "digits: consistency.steps='many' must be a valid integer",
    "digits consistency.steps=1e5": "digits: consistency.steps=100000.0 must be an integer; write 100000",
    "digits consistency.batch=0": "digits: consistency.batch=0 must be greater than 0",
    "digits consistency.optimizer=sgd": "digits: consistency.optimizer='sgd' must be 'radam', 'adam' or 'adamw'",
    "digits consistency.betas=0.9": "digits: consistency.betas=0.9 must be a list, in brackets",
    "digits consistency.betas=[0.9,1.0]": "digits: consistency.betas[1]=1.0 must be less than 1",
    "digits consistency.averages=[]": "digits: consistency.averages=[] must have at least 1 item, not 0",
    "digits consistency.guard=off": "digits: consistency.guard='off' must be a table of keys",
    "digits consistency.objective=gan": (
        "digits: consistency.objective='gan' is unknown; use one of diffusion, consistency, truncated "
        "(name your own class as module:Class)"
    ),
    "digits network.kind=resnet": (
        "digits: network.kind='resnet' is unknown; use one of ddpmpp, edm2, text_unet, diffusers_unet (name your own "
        "class as module:Class)"
    ),
    "digits network.kind=ddpm": (
        "digits: network.kind='ddpm' is unknown; did you mean 'ddpmpp'? (name your own class as module:Class)"
    ),
    "digits network.kind=nowhere:UNet": (
        "digits: network.kind='nowhere:UNet' cannot be imported (No module named 'nowhere'); "
        "put its module on the Python path"
    ),
    "digits consistency.objective=json:JSONDecoder": (
        "digits: consistency.objective='json:JSONDecoder' is not a subclass of Stage; name one that is"
    ),
    "digits truncated.curriculum.lmit=0.9": (
        "digits: truncated.curriculum.lmit is not a known key; did you mean 'limit'?"
    ),
    "digits consistency.averages=[{kind='power',gama=3.0}]": (
        "digits: consistency.averages[0].gama is not a known key; did you mean 'gamma'?"
    ),
    "digits consistency.averages=[{kind='powr'}]": (
        "digits: consistency.averages[0].kind='powr' must be one of 'constant', 'power'"
    ),
    "digits truncated.times=3": "digits: truncated.times=3 must be a table of keys",
    "digits data.path=none": "digits: data.path cannot be unset; give it a value",
    "digits truncated.times.kind=lognormal": "digits: truncated.times.mean is missing; add it",
    "digits data.channels=2": "digits: data.channels=2 must be 1 or 3",
    "digits t_max=inf": "digits: t_max=inf must be a finite number",
    "digits image_shape=[1,8]": "digits: image_shape[2] is missing; add it",
    # schedule
    "imagenet64-s truncated.schedule_offset=-1": (
        'imagenet64-s: truncated.schedule_offset=-1: must be a number of steps, 0 or more, or "continue"'
    ),
    "imagenet64-s truncated.schedule_offset=on": (
        "imagenet64-s: truncated.schedule_offset='on': must be a number of steps, 0 or more, or \"continue\""
    ),
    "imagenet64-xl truncated.schedule_offset=continue": (
        "imagenet64-xl: truncated.schedule_offset='continue' continues the count of an earlier stage, but init="
        "'previous' is not one; give the number of steps that the model was trained for, such as schedule_offset=150000"
    ),
    "cifar10 truncated.schedule_offset=continue": (
        "cifar10: truncated.schedule_offset='continue' has no effect on schedule='constant' and constant averages; "
        "remove it, or use schedule='inverse_sqrt' or a power average"
    ),
    # times
    "digits consistency.steps=until-flat consistency.curriculum.d=0": (
        "digits: consistency.steps='until-flat' needs curriculum.d above 0; give the bound: steps=1000 and "
        "until_flat=true"
    ),
    "digits diffusion.steps=until-flat": "digits: diffusion.steps='until-flat' must be a valid integer",
    "digits truncated.until_flat=true": (
        "digits: truncated.until_flat=true needs a later stage that keeps its model frozen; add it, or give a number "
        "of steps and until_flat=false"
    ),
    "digits consistency.until_flat=true consistency.watched_images=0": (
        "digits: consistency.until_flat=true needs watched_images above 0; add it, or give a number of steps and "
        "until_flat=false"
    ),
    "digits truncated.t_prime=auto consistency.watched_images=0": (
        "digits: truncated: t_prime='auto' is chosen by what is measured while the frozen model is trained, but "
        "frozen='previous' is not watched (consistency.watched_images=0); set truncated.t_prime=1.125"
    ),
    "imagenet64-xl truncated.t_prime=auto": (
        "imagenet64-xl: truncated: t_prime='auto' is chosen by what is measured while the frozen model is trained, but "
        "frozen='previous' comes from outside of this run; set truncated.t_prime=0.75"
    ),
    "digits truncated.t_prime=auto truncated.times.low=0.75": (
        "digits: truncated.t_prime='auto' may become 1.125, but then times.low=0.75 is below t_prime=1.125; use "
        "low=1.125"
    ),
    "digits truncated.t_prime=later": """digits: truncated.t_prime='later': must be a number above 0, or "auto\"""",
    "digits truncated.t_prime=80": (
        "digits: truncated.t_prime=80.0 must lie between t_min=0.002 and t_max=80.0; the paper uses 1.0"
    ),
    "digits truncated.t_prime=0.001": (
        "digits: truncated.t_prime=0.001 must lie between t_min=0.002 and t_max=80.0; the paper uses 1.0"
    ),
    "imagenet64-xl truncated.t_prime=2.0": (
        "imagenet64-xl: second_time=1.526 must be at least 2, where the range of truncated begins, and below "
        "80, where its sampling begins; change one of them"
    ),
    "digits second_time=0.821": (
        "digits: second_time=0.821 must be at least 1, where the range of truncated begins, and below 80, where its "
        "sampling begins; change one of them"
    ),
    "digits t_min=90": "digits: t_min=90.0 must lie below t_max=80.0",
    "digits consistency.t_high=90": (
        "digits: consistency.t_high=90.0 must lie between t_min=0.002 and t_max=80.0; "
        "set it to 'none' to use the whole range"
    ),
    "digits consistency.t_high=0.5": (
        "digits: truncated.frozen='previous' must cover times from 0.6848 to 1, but the consistency stage "
        "'consistency' is defined only from 0.002 to 0.5; change one of the two ranges or name another model"
    ),
    "digits truncated.times.low=0.5": ("digits: truncated: times.low=0.5 is below t_prime=1; use low=1"),
    "digits truncated.times.high=90.0": (
        "digits: truncated.times.high=90.0 lies outside the stage's range from 1 to 80; "
        "set it to 'none' to use the whole range"
    ),
    "digits consistency.times.low=0.001": (
        "digits: consistency.times.low=0.001 lies outside the stage's range from 0.002 to 80; "
        "set it to 'none' to use the whole range"
    ),
    "digits consistency.times.low=5.0 consistency.times.high=2.0": (
        "digits: consistency.times: times from low=5 to high=2 are not a valid range; use 0 < low < high"
    ),
    "digits consistency.times.low=80.0": (
        "digits: consistency.times: times from low=80 to high=80 are not a valid range; use 0 < low < high"
    ),
    "digits truncated.times={kind='lognormal',mean=-20,std=0.1}": (
        "digits: truncated.times: LogNormal(mean=-20.0, std=0.1, low=1.0, high=80.0, kind='lognormal') has no "
        "probability between low and high; move its mean towards them"
    ),
    "digits t_min=1e-7": ("digits: t_min=1e-07 must lie above 1e-06, the lowest time of a pair; use 0.002"),
    # batches and schedules
    "digits truncated.distance.c=0.0": (
        "digits: truncated.distance: c=0.0 must be above 0, because at 0 equal images have no gradient; "
        "use a small value such as 1e-8"
    ),
    "digits truncated.curriculum.limit=1": (
        "digits: truncated.curriculum: Curriculum(q=2.0, d=0, limit=1.0, k=8.0) does not keep Δ_t above 0; "
        "use q > 1, d ≥ 0, 0 < limit < 1 and k ≥ 0"
    ),
    "digits truncated.w_b=-1": ("digits: truncated: w_b=-1, the weight of the boundary loss, must be at least 0"),
    "digits diffusion.label_dropout=1": (
        "digits: diffusion: label_dropout=1 must be at least 0 and below 1; use 0 for none"
    ),
    "digits truncated.batch=4 truncated.rho=0.9999999999": (
        "digits: truncated: rho=0.9999999999 of a batch of 4 gives 4 boundary samples, but a batch needs at least one "
        "of them and one other; use a batch of at least 2 or another rho"
    ),
    "digits truncated.rho=0.005": (
        "digits: truncated: rho=0.005 of a batch of 128 gives 0 boundary samples, but a batch needs at least one "
        "of them and one other; use a batch of at least 200 or another rho"
    ),
    "digits truncated.accumulation=3": (
        "digits: truncated.batch=128 is not divisible by accumulation=3; use batch=126 or 129"
    ),
    "digits truncated.schedule=inverse_sqrt": (
        "digits: truncated.schedule='inverse_sqrt' needs schedule_reference, the step after which the learning rate "
        "falls; add it, such as schedule_reference=2000"
    ),
    "digits truncated.schedule_reference=100": (
        "digits: truncated.schedule_reference=100 has no effect on schedule='constant'; use schedule='inverse_sqrt' "
        "or schedule_reference='none'"
    ),
    "digits truncated.warmup=5000": "digits: truncated.warmup=5000 must be less than steps=450; shorten it",
    # stages that need one another
    "digits order=['diffusion','truncated']": (
        "digits: truncated.frozen='previous' is the diffusion stage 'diffusion', which cannot provide the frozen "
        "model; put a stage that makes one before 'truncated', or use one of: init"
    ),
    "digits order=['diffusion','diffusion']": (
        "overrides: order=['diffusion', 'diffusion'] must be a list of stages, each once; the stages are "
        '["diffusion", "consistency", "truncated"]'
    ),
    "digits order=[[1]]": (
        "overrides: order=[[1]] must be a list of stages, each once; the stages are "
        '["diffusion", "consistency", "truncated"]'
    ),
    "digits order=['stage1']": (
        "overrides: order names the unknown stage 'stage1'; the stages are diffusion, consistency, truncated"
    ),
    "digits consistency.teacher=difusion": (
        "digits: consistency.teacher='difusion' is not an earlier stage; did you mean 'diffusion'? "
        "(a model folder needs a slash: ./difusion)"
    ),
    "digits truncated.teacher=consistency": (
        "digits: truncated.teacher='consistency' is the consistency stage 'consistency', which cannot provide the "
        "teacher model; use one of: diffusion, init"
    ),
    "digits truncated.frozen=diffusion": (
        "digits: truncated.frozen='diffusion' is the diffusion stage 'diffusion', which cannot provide the frozen "
        "model; use one of: consistency, previous, init"
    ),
    "digits consistency.init=truncated": (
        "digits: consistency.init='truncated' does not come before 'consistency'; "
        "use one of: diffusion, previous, init, scratch"
    ),
    "cifar10 truncated.frozen=truncated": (
        "cifar10: truncated.frozen='truncated' does not come before 'truncated'; "
        "use one of: consistency, previous, init"
    ),
    "digits stages.seed={objective='diffusion',steps=1,batch=1,learning_rate=0.1}": (
        "digits: 'seed' is not a valid stage name; use lower-case letters, digits, - and _, and no reserved word"
    ),
    # labels
    "digits truncated.guidance=2.0": (
        "digits: truncated.guidance needs a teacher that was also trained without conditions; "
        "set diffusion.label_dropout=0.1 or truncated.guidance=1.0"
    ),
    "digits consistency.guidance=-1": "digits: consistency: guidance=-1 must be at least 0; 1 means no guidance",
    "cifar10 truncated.guidance=2.0": (
        "cifar10: truncated.guidance=2.0 needs a teacher; name a diffusion stage as teacher or set guidance=1.0"
    ),
    "cifar10 truncated.guidance=2.0 truncated.teacher=init": (
        "cifar10: truncated.guidance=2.0 needs conditions; set conditional=true or guidance=1.0"
    ),
    "digits consistency.label_dropout=1": (
        "digits: consistency: label_dropout=1 must be at least 0 and below 1; use 0 for none"
    ),
    "digits conditional=false truncated.label_dropout=0.1": (
        "digits: truncated.label_dropout=0.1 needs conditions; set conditional=true or label_dropout=0.0"
    ),
    "digits conditional=false diffusion.label_dropout=0.1": (
        "digits: diffusion.label_dropout=0.1 needs conditions; set conditional=true or label_dropout=0.0"
    ),
    "cifar10 uncertainty=128": (
        "cifar10: uncertainty=128 needs a stage that learns it, such as diffusion; add one or set it to 0"
    ),
    # networks
    "cifar10 network.channels=36": (
        "cifar10: network.channels=36 gives a layer of 144 channels, which group normalisation cannot divide into 32 "
        "groups; use a multiple of 32"
    ),
    "imagenet64-s network.channels=200": (
        "imagenet64-s: network.channels=200 gives an attention layer of 600 channels, which its 9 heads do not divide; "
        "use a multiple of 64"
    ),
    "fashion-mnist network.channel_mult=[1,2,2,2]": (
        "fashion-mnist: image height=28 is not a multiple of 8, which the 4 levels of channel_mult=[1, 2, 2, 2] need; "
        "resize the images or use fewer levels"
    ),
    # names
    "cifra10": (
        "recipe 'cifra10' does not exist; did you mean 'cifar10'? (your own recipe is a file that ends in .toml)"
    ),
    "nowhere.toml": "recipe 'nowhere.toml' cannot be read (No such file or directory); check the path",
}


@pytest.mark.parametrize(("command", "message"), WRONG_OVERRIDES.items(), ids=WRONG_OVERRIDES)
def test_override(command: str, message: str) -> None:
    name, *overrides = command.split(" ")
    with pytest.raises(TcmError) as caught:
        resolve(name, overrides)
    assert str(caught.value) == message


STAGE = "[stages.a]\nobjective = 'diffusion'\nsteps = 1\nbatch = 1\nlearning_rate = 0.1\n"
WRONG_FILES = {
    "extends = 'digits'\nextend = 'digits'": "extend is not a known key; remove it or correct its spelling",
    "extends = 'digit'": (
        "extends='digit' does not exist; did you mean 'digits'? (your own recipe is a file that ends in .toml)"
    ),
    "extends = 'digits'\n[data]\npath = 2024": 'data.path=2024 must be text; put it in quotes: "2024"',
    "extends = 3": "extends=3 must be the name of a recipe or a .toml file",
    "[network]\nkind = 'ddpmpp'\n" + STAGE: "data is missing; add it",
    "extends = 'digits'\n[stages.more]\nsteps = 5": "more.objective is missing; add it",
    "extends = 'digits'\n[stages.more]\nobjective = 'diffusion'\nstep = 5": (
        "more.step is not a known key; did you mean 'steps'?"
    ),
    "extends = 'digits'\n[stages.again]\nobjective = 'truncated'\nsteps = 5\nbatch = 128\nlearning_rate = 0.1\n"
    "curriculum = { limit = 0.9 }\nt_prime = 1.2": (
        "again.frozen='previous' must cover times from 0.8578 to 1.2, but the truncated stage 'truncated' is defined "
        "only from 1 to 80; change one of the two ranges or name another model"
    ),
    "extends = 'digits'\nstages = 3": "stages=3 must be a table of keys",
}


@pytest.mark.parametrize(("text", "message"), WRONG_FILES.items())
def test_file(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(TcmError) as caught:
        resolve(str(file))
    assert str(caught.value) == f"{file}: {message}"


def test_syntax(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("seed = \n")
    with pytest.raises(TcmError, match=r"mine.toml is not valid TOML: Invalid value \(at line 1, column 8\)"):
        resolve(str(file))


def test_not_text(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_bytes(b"name = '\xff'")
    with pytest.raises(TcmError, match=r"mine.toml is not UTF-8 text; save it as UTF-8"):
        resolve(str(file))


def test_circle(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    first, second = tmp_path / "first.toml", tmp_path / "a" / "second.toml"
    first.write_text("extends = 'a/second.toml'")
    second.write_text("extends = '../a/../first.toml'")
    with pytest.raises(TcmError) as caught:
        resolve(str(first))
    assert str(caught.value) == (f"{second}: extends='{first}' is circular; remove one `extends`")
