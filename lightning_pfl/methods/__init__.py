"""The federated methods; ``make tables`` writes this registry from their files."""

from lightning_pfl.methods.accelerated_l2gd import AcceleratedL2GD
from lightning_pfl.methods.apfl import APFL
from lightning_pfl.methods.cfl import CFL
from lightning_pfl.methods.cluster_oracle import ClusterOracle
from lightning_pfl.methods.convex_clustering import ConvexClustering
from lightning_pfl.methods.ditto import Ditto
from lightning_pfl.methods.fedasa import FedASA
from lightning_pfl.methods.fedavg import FedAvg
from lightning_pfl.methods.fedbn import FedBN
from lightning_pfl.methods.feddane import FedDANE
from lightning_pfl.methods.feddf import FedDF
from lightning_pfl.methods.fedem import FedEM
from lightning_pfl.methods.fedmap import FedMAP
from lightning_pfl.methods.fedmd import FedMD
from lightning_pfl.methods.fedmtl import FedMTL
from lightning_pfl.methods.fedper import FedPer
from lightning_pfl.methods.fedpop import FedPop
from lightning_pfl.methods.fedprox import FedProx
from lightning_pfl.methods.fedrep import FedRep
from lightning_pfl.methods.fedsplit import FedSplit
from lightning_pfl.methods.fedu import FedU
from lightning_pfl.methods.gtvmin import GTVMin
from lightning_pfl.methods.heterofl import HeteroFL
from lightning_pfl.methods.homological import HomologicalConstraints
from lightning_pfl.methods.ifca import IFCA
from lightning_pfl.methods.l2gd import L2GD
from lightning_pfl.methods.lg_fedavg import LGFedAvg
from lightning_pfl.methods.linear_fedrep import LinearFedRep
from lightning_pfl.methods.local import LocalOnly
from lightning_pfl.methods.lp_proj import LpProj
from lightning_pfl.methods.matched_fedavg import MatchedFedAvg
from lightning_pfl.methods.mocha import MOCHA
from lightning_pfl.methods.per_fedavg import PerFedAvg
from lightning_pfl.methods.perada import PerAda
from lightning_pfl.methods.pfedbayes import PFedBayes
from lightning_pfl.methods.pfedme import PFedMe
from lightning_pfl.methods.scaffold import SCAFFOLD
from lightning_pfl.methods.sheaf_fmtl import SheafFMTL
from lightning_pfl.methods.squared_penalty import SquaredPenalty

__all__ = [
    "AcceleratedL2GD",
    "APFL",
    "CFL",
    "ClusterOracle",
    "ConvexClustering",
    "Ditto",
    "FedASA",
    "FedAvg",
    "FedBN",
    "FedDANE",
    "FedDF",
    "FedEM",
    "FedMAP",
    "FedMD",
    "FedMTL",
    "FedPer",
    "FedPop",
    "FedProx",
    "FedRep",
    "FedSplit",
    "FedU",
    "GTVMin",
    "HeteroFL",
    "HomologicalConstraints",
    "IFCA",
    "L2GD",
    "LGFedAvg",
    "LinearFedRep",
    "LocalOnly",
    "LpProj",
    "MatchedFedAvg",
    "MOCHA",
    "PerAda",
    "PerFedAvg",
    "PFedBayes",
    "PFedMe",
    "SCAFFOLD",
    "SheafFMTL",
    "SquaredPenalty",
]
