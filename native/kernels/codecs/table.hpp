// Every stored format, in the order of CodecId.
#pragma once

#include "kernels/codecs/plain.hpp"

#define KVPOOL_CODEC_TABLE {functions_of<CodecId::fp32>(), functions_of<CodecId::fp16>(), functions_of<CodecId::bf16>()}
