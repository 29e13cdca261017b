"""The standard column names, which are those of the field, so that other libraries can read the logs.

A batch may hold any other column. rlio gives a meaning to the columns listed here.
"""

from collections.abc import Iterable
from typing import Final


class Columns:
    """Names of the columns that rlio understands; each constant is the string itself."""

    __slots__ = ()

    OBS: Final = "obs"
    NEXT_OBS: Final = "new_obs"
    #: bool; written only if a final observation is missing (``new_obs`` holds zeros in those rows).
    NEXT_OBS_VALID: Final = "new_obs_valid"
    ACTIONS: Final = "actions"
    REWARDS: Final = "rewards"
    TERMINATEDS: Final = "terminateds"
    TRUNCATEDS: Final = "truncateds"
    #: Read-only: terminated OR truncated. Never stored.
    DONES: Final = "dones"
    INFOS: Final = "infos"
    EPS_ID: Final = "eps_id"
    UNROLL_ID: Final = "unroll_id"
    AGENT_INDEX: Final = "agent_index"
    #: Step number within the episode, from 0.
    T: Final = "t"
    ENV_ID: Final = "env_id"
    #: Seed of the reset that began the row's episode; -1: no seed.
    ENV_SEED: Final = "env_seed"
    SEQ_LENS: Final = "seq_lens"
    PREV_ACTIONS: Final = "prev_actions"
    PREV_REWARDS: Final = "prev_rewards"
    ACTION_DIST_INPUTS: Final = "action_dist_inputs"
    ACTION_LOGP: Final = "action_logp"
    ACTION_PROB: Final = "action_prob"
    VF_PREDS: Final = "vf_preds"
    ADVANTAGES: Final = "advantages"
    VALUE_TARGETS: Final = "value_targets"
    #: Value of the observation after each row; 0 in rows that are not bootstrapped.
    VALUES_BOOTSTRAPPED: Final = "values_bootstrapped"
    WEIGHTS: Final = "weights"
    #: Version number of the policy weights that chose the action.
    WEIGHTS_SEQ_NO: Final = "weights_seq_no"
    BATCH_INDEXES: Final = "batch_indexes"
    #: Name of the row's source in a mixture.
    SOURCE: Final = "source"


#: Recurrent state columns are ``state_in_0, state_in_1, ...``: one row per sequence, not per step.
STATE_IN_PREFIX: Final = "state_in_"
STATE_OUT_PREFIX: Final = "state_out_"

#: Policy id of a batch that names no policy.
DEFAULT_POLICY_ID: Final = "default_policy"


#: Column for an agent id that is not an int, which `Columns.AGENT_INDEX` cannot hold.
AGENT_ID: Final = "agent_id"

#: Columns that describe one trajectory.
TRAJECTORY: Final = frozenset(
    {
        Columns.OBS,
        Columns.NEXT_OBS,
        Columns.NEXT_OBS_VALID,
        Columns.ACTIONS,
        Columns.REWARDS,
        Columns.TERMINATEDS,
        Columns.TRUNCATEDS,
        Columns.INFOS,
        Columns.EPS_ID,
        Columns.AGENT_INDEX,
        Columns.T,
    }
)

#: Columns that samplers record for each row automatically.
RECORDED: Final = TRAJECTORY | {
    Columns.DONES,
    Columns.UNROLL_ID,
    Columns.ENV_ID,
    Columns.ENV_SEED,
    Columns.WEIGHTS_SEQ_NO,
}


def with_possible_validity(columns: Iterable[str]) -> frozenset[str]:
    """The ``columns`` to read, plus ``new_obs_valid`` if they have ``new_obs``, some of which may be missing.

    For readers that do not know before they read whether there is such a column.
    """
    names = frozenset(columns)
    return names | {Columns.NEXT_OBS_VALID} if Columns.NEXT_OBS in names else names


def is_per_sequence(column: str) -> bool:
    """Whether ``column`` has one row a sequence (``seq_lens``, ``state_in_k``) instead of one a step."""
    return column == Columns.SEQ_LENS or column.startswith(STATE_IN_PREFIX)
